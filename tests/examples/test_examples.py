"""The examples run as they stand: `main` in the shared ranks, and with `slow` by the commands in their docstrings."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("layer", "transformers_trainer", "place_experts")
WITH_TRL = ("trl_sft", "trl_dpo", "trl_grpo")
RANKS_IMPORT = ("tests.hf.meshes", "carpool.hf", "transformers")


def _main(name: str) -> str:
    """What the example prints on this rank. The pool's process group stands in for the example's own."""
    from tests.hf.meshes import reuse_meshes

    reuse_meshes()
    os.environ["STEPS"] = "6"
    init, destroy = dist.init_process_group, dist.destroy_process_group
    functions: Any = dist
    functions.init_process_group = functions.destroy_process_group = lambda *_: None
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.path.remove(str(EXAMPLES))
        functions.init_process_group, functions.destroy_process_group = init, destroy
    return printed.getvalue()


def _check(name: str, text: str) -> None:
    """The loss falls; placement leaves fewer ranks per token; what is rewarded becomes more."""
    pattern = r"ranks per token ([0-9.]+) -> ([0-9.]+)" if name == "place_experts" else r"loss ([0-9.]+)"
    found = re.findall(r"reward ([0-9.]+)", text)[::-1] if name == "trl_grpo" else re.findall(pattern, text)
    assert len(found) >= 2, text
    pairs = found if name == "place_experts" else [(found[0], found[-1])]
    assert all(float(after) < float(before) for before, after in pairs), text


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name: str, ranks: Ranks) -> None:
    _check(name, ranks(_main, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, *WITH_TRL])
def test_example_under_torchrun(name: str) -> None:
    if name in WITH_TRL:
        pytest.importorskip("trl")
    text = (EXAMPLES / f"{name}.py").read_text()
    command = re.search(r"torchrun (.*)", text)
    assert command is not None
    _check(name, _run("-m", "torch.distributed.run", *command[1].split()))


@pytest.mark.slow
def test_an_example_on_one_device() -> None:
    pytest.importorskip("trl")
    text = _run("examples/trl_lora.py")
    eager, fast = (line.split(",")[0].split("loss", 1)[1] for line in text.splitlines() if " loss " in line)
    assert eager == fast and "no CUDA graphs, because there is no GPU" in text
    _check("trl_lora", text)


@pytest.mark.slow
def test_training_from_a_configuration(tmp_path: Path) -> None:
    toml = EXAMPLES / "train_from_config" / "olmoe_tiny.toml"
    assert f"carpool train --config {toml.relative_to(ROOT)}" in toml.read_text()
    text = _run("-m", "carpool.cli", "train", "--config", str(toml), f"training.output_dir={tmp_path}/run")
    assert (tmp_path / "run" / "summary.json").is_file() and "ranks per token" in text


def test_the_configuration_is_valid() -> None:
    from carpool.train.config import load_config

    config = load_config(EXAMPLES / "train_from_config" / "olmoe_tiny.toml", [])
    assert config.parallelism.ep_size == 2


def test_the_large_configuration_fits() -> None:
    """At most 12 keys, and on two H200 there is little room: whatever a run takes more of is seen here."""
    from carpool.train.config import load_config
    from carpool.train.plan.dry_run import dry_run

    path = EXAMPLES / "train_from_config" / "qwen3_30b_a3b.toml"
    assert sum(map(len, tomllib.loads(path.read_text()).values())) <= 12
    said = dry_run(load_config(path, ["parallelism.num_ranks=2"]), gpu="h200").splitlines()
    assert re.fullmatch(r"# fits in 139 GiB \(1[23][0-9]\.[0-9] GiB at the peak\)", said[-1]), said[-1]
    assert any("parameters, 3,353,032,704 active per token" in line for line in said)
    assert "# CUDA graphs: forward and backward" in said


def test_examples_are_short() -> None:
    for path in EXAMPLES.rglob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path


def _run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
