"""The settings of tests that need GPUs, and of benchmarks, are ones that runs take today.

Where there is no GPU nothing runs them, so a setting that is renamed, or a combination that is refused since, would
stay unseen. Here all of them go through the schema and the checks of a run before its first step, with GPUs imagined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import moments, moving, one_gpu_memory, peaks, points, runs, snapshots, texts
from carpool.bench.model.model_settings import STEPS_ALONE
from carpool.train.config import Config, load_config, resolve_config
from examples.tiny_chat_model import write
from tests.bench.started import check_bench, check_steps, check_train, options_of
from tests.environment import ROOT
from tests.gpu.runs import BENCHES, OF_THE_TEST, RUNS, WORK

SETTING = re.compile(rf"({'|'.join(Config.model_fields)})\.[a-z_.0-9]+=")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_a_gpu_test_is_taken(name: str, tmp_path: Path) -> None:
    if any(WORK in one for one in RUNS[name].settings):
        write(tmp_path / "tiny")
    check_train([*RUNS[name].arguments(tmp_path), f"training.output_dir={tmp_path}/run"])


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_of_a_gpu_test_is_taken(name: str) -> None:
    check_bench(BENCHES[name], gpus=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.sample_tokens=4", "training.sample_prompt=none"], "training.sample_tokens = 4 .* changes nothing"),
        (["training.sample_token=4"], "did you mean training.sample_tokens"),
        (["parallelism.ep_size=3"], "parallelism.ep_size"),
        (["parallelism.pp_size=2", "moe.schedule=two-batch"], "two-batch"),
    ],
)
def test_what_runs_refuse_is_refused_here(settings: list[str], message: str) -> None:
    """Also what only the checks of a run on GPUs see."""
    with pytest.raises(ValueError, match=message):
        check_train(["parallelism.num_ranks=2", *settings])


def _of_benchmarks() -> dict[str, tuple[list[str], int]]:
    """Settings of the runs that the scripts of benchmarks/ build, with how many ranks they take at least."""
    moved = options_of("benchmarks.moving", ["--work", "work"])
    moved.stop_at = moved.every + moved.lag
    found = {
        f"peaks: {name}": (peaks.settings_of(name, False, Path("work")), ranks)
        for name, (_, ranks) in peaks.SETTINGS.items()
    }
    found |= {
        f"points: {name}": (settings, 1 if name.startswith("one/") else 2)
        for name, (settings, _) in points.POINTS.items()
    }
    alone = list(STEPS_ALONE)
    found = {
        name: ([*alone, "training.check_memory=false", *settings], ranks) for name, (settings, ranks) in found.items()
    }
    found |= {
        f"moments: {name}": ([*settings, *moments.ALONE, "training.max_steps=500"], 1)
        for name, settings in moments.CONTENDERS.items()
    }
    found |= {
        f"one_gpu_memory: {row}": (
            ["model.config=qwen3-30b-a3b", *one_gpu_memory.settings_of(row, Path("work"), 6, tiny=True)],
            1,
        )
        for row in one_gpu_memory.ROWS
    }
    found |= {f"snapshots: {name}": (settings, 1) for name, settings in snapshots.SETTINGS.items()}
    found["texts"] = (texts.settings(Path("work")), 1)
    halves = [*moving.settings(moved), *moving.placed(moved), f"training.save_steps={moved.stop_at}"]
    return {**found, "moving": (halves, 2)}


@pytest.mark.parametrize("name", _of_benchmarks())
def test_a_run_of_a_benchmark_is_taken(name: str) -> None:
    settings, ranks = _of_benchmarks()[name]
    here = [f"parallelism.num_ranks={ranks}", "training.output_dir=nowhere"]
    if name.startswith("one_gpu_memory"):
        load_config(one_gpu_memory.file_of(name.rpartition(" ")[2]), [*settings, *here])
        return
    if name in ("texts", "moving") or "adapter.kind=lora" in settings:
        # What these take is made when they run: text, a tokenizer, a model. The schema sees the rest.
        load_config(None, [*settings, *here])
    else:
        check_steps(resolve_config(None, [*settings, *here]))


def test_tiny_sizes_fit_the_settings_that_they_replace() -> None:
    for name, (_, ranks) in peaks.SETTINGS.items():
        tiny = peaks.settings_of(name, True, Path("work"))
        load_config(None, [*STEPS_ALONE, *tiny, f"parallelism.num_ranks={ranks}", "training.output_dir=nowhere"])


# ------------------------------------------------------------------------------- settings that are in no table


def _settings_in(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Texts of a module that are settings: (as far as it is written there, line, whether all of it is)."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        head = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if id(node) in inside or not isinstance(head, ast.Constant) or not isinstance(head.value, str):
            continue
        if SETTING.match(head.value):
            whole = head is node
            yield head.value if whole else head.value.partition("=")[0] + "=", node.lineno, whole


GPU_FILES = sorted(path for path in (ROOT / "tests" / "gpu").glob("*.py") if path.name != "runs.py")
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.name != "pending.py")


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_gpu_tests_name_no_settings_themselves(path: Path) -> None:
    for text, line, whole in _settings_in(path):
        known_then = text.partition("=")[0] in OF_THE_TEST and (not whole or text.endswith("=last"))
        assert known_then, f"{path}:{line}: put {text} into RUNS of tests/gpu/runs.py, which a test without a GPU reads"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_settings_of_benchmarks_are_in_a_run_that_is_checked(path: Path) -> None:
    here = ["parallelism.num_ranks=", "parallelism.device=", "training.output_dir=", "training.max_steps="]
    when_run = ["training.stop_at_step=", "training.resume_from_checkpoint=last", "model.path="]
    checked = {one for settings, _ in _of_benchmarks().values() for one in settings} | {*runs.TINY, *runs.QWEN_TINY}
    heads = {one.partition("=")[0] + "=" for one in checked} | {*here, *when_run}
    for text, line, whole in _settings_in(path):
        assert text in (checked | {*when_run} if whole else heads), (
            f"{path}:{line}: {text} is in no run that _of_benchmarks of {__name__} lists, so nothing checks it"
        )


def test_a_setting_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_new_gpu.py").write_text(
        'A = "moe.chunks"\ndef f(x):\n    return ["moe.chunks=2", f"moe.layout={x}", f"{x}moe.chunks=2"]\n'
    )
    assert list(_settings_in(tmp_path / "test_new_gpu.py")) == [("moe.chunks=2", 3, True), ("moe.layout=", 3, False)]
