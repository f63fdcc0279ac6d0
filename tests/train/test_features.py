"""Each row of docs/reference/features.md has keys that are declared and tests that are there. Runs of two ranks with a
feature, of which one is killed by SIGKILL, go on as if nothing had happened, and one rank computes the same."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from carpool import cli
from carpool.train.config import describe
from carpool.train.records.metrics_writer import Recorder
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, records, run, weights

RANKS_IMPORT = ("tests.train.test_loop",)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
STEPS = 6
COMMON = [
    *MODEL, "training.per_device_train_batch_size=1", "training.save_steps=2", "training.eval_steps=2",
    f"training.max_steps={STEPS}", "parallelism.device=cpu",
]  # fmt: skip
# Of a published model: two ranks with one sequence each have the balance loss of one rank with both.
SCRATCH = ["moe.balance_batch=global"]
MIX = "[{path='TEXT/a', weight=3}, {path='TEXT/b', weight=1}]"
ADAPTER = [
    "model.path=BASE", "model.dtype=float32", "training.learning_rate=1e-2", "data.tokenizer=bytes",
    "adapter.kind=lora", "adapter.rank=3", "adapter.targets=['attention', 'experts']",
]  # fmt: skip
# Settings by the rows of the page; TEXT and BASE stand for folders.
FEATURES = {
    "Muon": ["training.optimizer=muon", 'training.optimizer_options.ns_dtype="float32"', *SCRATCH],
    "Warm-up–stable–decay": [
        "training.lr_scheduler_type=warmup_stable_decay",
        'training.lr_scheduler_kwargs={decay_type="1-sqrt", num_decay_steps=3}', *SCRATCH,
    ],
    "Other schedules": ["training.lr_scheduler_type=inverse_sqrt", "training.warmup_steps=2", *SCRATCH],
    "Rates by patterns": ['training.learning_rates={"*.experts.*"=1e-3}', *SCRATCH],
    "Mixtures of data": [f"data.sources={MIX}", *SCRATCH],
    "Streaming": [f"data.sources={MIX}", "data.streaming=true", "data.stream_buffer=5", "data.eval=TEXT/b", *SCRATCH],
    "Named evaluation sets": ["data.train=TEXT/a", 'data.eval={first="TEXT/a", second="TEXT/b"}', *SCRATCH],
    "Router z-loss": ["moe.router_z_loss_coef=1e-2", *SCRATCH],
    "Sequence-wise balance": ["moe.sequence_aux_loss_coef=1e-2", *SCRATCH],
    "Global-batch balance": ["model.config.router_aux_loss_coef=0.2", *SCRATCH],
    "Best model, early stopping": [
        "training.load_best_model_at_end=true", "training.early_stopping_patience=3", *SCRATCH,
    ],
    "Average of weights (EMA)": ["training.ema_decay=0.6", *SCRATCH],
    "LoRA": [*ADAPTER, "adapter.kind=rslora", "training.loraplus_lr_ratio=4"],
    "Ranks and alphas by patterns": [
        *ADAPTER, "adapter.rank_pattern={'experts.down_proj'=2, 'layers\\.1\\.self_attn\\..*'=5}",
        "adapter.alpha_pattern={o_proj=64}",
    ],
    "Choice of layers": [*ADAPTER, "adapter.layers_to_transform=[1]"],
    "New tokens": [*ADAPTER, "adapter.trainable_token_indices=[32, 101]", "adapter.modules_to_save=lm_head"],
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    pool = Ranks(RANKS_IMPORT, world_size=1)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    for name, count in (("a", 30), ("b", 12)):
        (folder / name).mkdir()
        for i in range(count):
            (folder / name / f"{i:02d}.txt").write_text(f"def {name}{i}(x):\n    return x + {i}\n" * 20)
    tiny_model(discover()["qwen3_moe"], vocab_size=259, output_router_logits=False).save_pretrained(folder / "base")
    return folder


def run_and_die(output: str, settings: list[str]) -> str:
    """On a rank: as `run`, but rank 1 is killed after its fifth step, past a whole checkpoint."""
    write = Recorder.write

    def write_or_die(self: Recorder, kind: str, step: int, **fields: Any) -> None:
        write(self, kind, step, **fields)
        if (kind, step, torch.distributed.get_rank()) == ("train", 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Recorder, "write", write_or_die):
        return run(output, settings)


# All of them are in the slow set, and two in the quick one.
SOME = [name if name in ("Muon", "LoRA") else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]


@pytest.mark.parametrize("name", SOME)
def test_a_killed_run_goes_on_and_one_rank_computes_the_same(
    one_rank: Ranks, two_ranks: Ranks, folder: Path, tmp_path: Path, name: str
) -> None:
    settings = [one.replace("TEXT", str(folder)).replace("BASE", f"{folder}/base") for one in FEATURES[name]]
    if not any(one.startswith(("data.train", "data.sources")) for one in settings):
        settings += [f"data.train={folder}/a"]
    if not any(one.startswith("data.eval") for one in settings):
        settings += ["data.eval_fraction=0.1"]
    settings = [*COMMON, f"data.cache_dir={folder}/cache", *settings]
    if any(one.startswith("model.path") for one in settings):
        settings = [one for one in settings if not one.startswith(("model.model_type", "model.config"))]
    whole, killed, one = tmp_path / "whole", tmp_path / "killed", tmp_path / "one"
    assert two_ranks(run, str(whole), settings) == [""] * 2
    with pytest.raises(RuntimeError, match="rank"):
        two_ranks(run_and_die, str(killed), settings)
    assert not (killed / "summary.json").exists() and (killed / "checkpoints" / "step-00000002").is_dir()
    assert two_ranks(run, str(killed), [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS
    expected, found = weights(whole, STEPS), weights(killed, STEPS)
    assert (
        found.keys() == expected.keys() and [key for key in found if not torch.equal(found[key], expected[key])] == []
    )
    assert one_rank(run, str(one), [*settings, "training.per_device_train_batch_size=2"]) == [""]
    for step, (loss, _) in losses(one).items():
        assert loss == pytest.approx(losses(whole)[step][0], abs=1e-3), step
    for step, line in records(one, "eval").items():
        assert line["loss"] == pytest.approx(records(whole, "eval")[step]["loss"], abs=1e-3)


def rows() -> list[list[str]]:
    """Of the page's tables: the cells of each row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line][1:]


def test_the_table_is_true() -> None:
    """Each feature's keys are declared, or commands that there are; its tests are there; and each is killed here."""
    known = {name for name, *_ in describe()}
    commands = {one.name or one.callback.__name__ for one in cli.app.registered_commands}
    assert FEATURES.keys() <= {row[0] for row in rows()}
    for name, keys, tests, *others in rows():
        assert len(others) == 4 and all(others), name
        assert "`" in keys, name
        for key in re.findall(r"`([^`]+)`", keys):
            word = key.partition("=")[0]
            assert word in known or (word.startswith("carpool ") and word.split()[1] in commands), (name, key)
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named or name in FEATURES, name
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (name, test)
