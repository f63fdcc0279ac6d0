"""The best checkpoint, early stopping, and what happens each epoch. Killed runs end as those that nothing stopped."""

from __future__ import annotations

import json
import math
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from carpool import cli
from carpool.serve.served_model import find_source
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.manager import CheckpointManager, step_of
from carpool.train.config import TrainingSection
from carpool.train.run import finish
from carpool.train.run.best_model import Best, is_due
from carpool.train.run.finish import UnwrittenError
from tests.ranks import Ranks
from tests.train.test_kill import stopped_by_signal
from tests.train.test_loop import TWO, losses, records, run, start_two, weights

# The rate grows until steps make the model worse.
WORSE = [
    "training.learning_rate=1.0", "training.warmup_steps=40", "training.max_steps=40", "training.eval_steps=1",
    "training.save_strategy=no", "training.save_total_limit=1", "training.load_best_model_at_end=true",
    "training.early_stopping_patience=3", "training.save_pretrained=true",
]  # fmt: skip


def test_what_is_best_and_when_it_is_asked() -> None:
    best = Best()
    better = [best.add(step, loss, 0.0) for step, loss in enumerate([3.1, 2.8, 2.9, 2.7, 2.75, math.nan], 1)]
    assert better == [True, True, False, True, False, False] and best == Best(4, 2.7, 2, 2.7, 6)
    assert not best.add(6, 1.0, 0.0) and best.waited == 2, "the same step counts once"
    slow = Best()
    assert [slow.add(step, 3.0 - step / 100, 0.1) for step in range(3)] == [True] * 3
    assert (slow.step, slow.waited, slow.than) == (2, 2, 3.0)
    odd = Best()
    assert [odd.add(step, loss, 0.0) for step, loss in enumerate([math.nan, 3.0, 2.9], 1)] == [False, True, True]
    assert odd == Best(3, 2.9, 0, 2.9, 3), "what comes after a loss that is no number is compared"
    assert [step for step in range(1, 32) if is_due("epoch", 1, step, 10.25)] == [11, 21, 31]
    assert [step for step in range(1, 9) if is_due("epoch", None, step, 0.5)] == list(range(1, 9))
    assert not is_due("no", 1, 1, 1.0) and not is_due("epoch", 1, 1, math.inf)
    # 9 / (9 / 7) is 6.999..., and 7 * (29 / 7) is 29.000...04.
    assert is_due("epoch", 1, 9, 9 / 7) and not is_due("epoch", 1, 30, 29 / 1)
    assert TrainingSection(num_train_epochs=7).in_steps(29 / 7).steps == 29


def test_parts_of_a_run_stop_where_it_stops(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """A part may end at a step at which the whole run does not evaluate."""
    # Nothing is learned, so that the second evaluation is no better.
    settings = [*text, "training.learning_rate=0", "training.eval_steps=2", "training.early_stopping_patience=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start_two(two_ranks, whole, settings) == [""] * 2
    assert start_two(two_ranks, parts, [*settings, "training.stop_at_step=3"]) == [""] * 2
    assert start_two(two_ranks, parts, [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 2, 4], "each step once"
    assert losses(parts) == losses(whole) and max(losses(whole)) == 4
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (whole, parts)]
    for key in ("steps", "best_step", "best_eval_loss", "final_eval_loss"):
        assert ends[0][key] == ends[1][key], key
    assert ends[0]["best_step"] == 2


@pytest.mark.timeout(900)
def test_a_run_ends_with_its_best_model(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start_two(two_ranks, whole, [*text, *WORSE]) == [""] * 2
    evals = {step: line["loss"] for step, line in records(whole, "eval").items() if step}
    best, last = min(evals, key=lambda step: evals[step]), max(evals)
    assert 0 < best == last - 3 and last < 40
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["best_step"], summary["best_eval_loss"]) == (best, evals[best])
    assert list(map(step_of, CheckpointManager(whole).list())) == [best, last]
    assert find_source(whole).checkpoint == CheckpointManager(whole).list()[0], "generate and eval take it, too"
    for options, step in (([], best), (["--newest"], last)):
        done = CliRunner().invoke(cli.app, ["export", str(whole), "--out", str(tmp_path / f"out{step}"), *options])
        assert (
            done.exit_code == 0
            and f"step-{step:08d}: " in done.output
            and ("the best checkpoint" in done.output) == (step == best)
        )
    saved = weights(whole, best)
    for name, value in AutoModelForCausalLM.from_pretrained(whole / "model").state_dict().items():
        if "experts" not in name:
            assert torch.equal(value, saved[f"model/{name}"]), name
    for stop in (best, last - 1):  # with its best step behind it, too
        resume = ["training.resume_from_checkpoint=auto", f"training.stop_at_step={stop}"]
        assert start_two(two_ranks, parts, [*text, *WORSE, *resume]) == [""] * 2
    assert start_two(two_ranks, parts, [*text, *WORSE, "training.resume_from_checkpoint=last"]) == [""] * 2
    # One that a signal stopped between a step and its evaluation: the run that goes on begins with that.
    signalled, settings = tmp_path / "signalled", [*text, *WORSE, "training.per_device_train_batch_size=4"]
    two_ranks(stopped_by_signal, str(signalled), settings)
    left = CheckpointManager(signalled).latest()
    assert left is not None
    step = step_of(left)
    assert step not in records(signalled, "eval")
    assert start_two(two_ranks, signalled, [*settings, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert step in records(signalled, "eval")
    for folder in (parts, signalled):
        assert losses(folder) == losses(whole)
        assert {step: one["loss"] for step, one in records(folder, "eval").items() if step} == evals
        assert list(map(step_of, CheckpointManager(folder).list())) == [best, last]
        assert json.loads((folder / "summary.json").read_text())["best_step"] == best


def _without_a_save(output: str, settings: list[str], losses: list[float], failing: int) -> str:
    """On a rank: a run whose held-out losses are known, and which cannot write one of its checkpoints."""
    save, patched = CheckpointManager.save, unittest.mock.patch.object

    def failing_save(manager: CheckpointManager, step: int, *args: Any, **more: Any) -> Any:
        if step == failing:
            raise CheckpointWriteError(f"the disk is full at step {step}")
        return save(manager, step, *args, **more)

    with (
        patched(finish, "metric", unittest.mock.Mock(side_effect=losses)),
        patched(CheckpointManager, "save", failing_save),
    ):
        try:
            return run(output, settings)
        except UnwrittenError as error:
            return str(error)


@pytest.mark.parametrize(
    ("losses", "failing", "best", "left"),
    [
        ([3.0, 2.0, 2.5, 2.6], 2, 3, [3, 4]),
        # The last one is the best, and cannot be written: the best before it stays, and is what the run ends with.
        ([3.0, 2.0, 2.5, 1.9], 4, 2, [2]),
    ],
)
def test_the_best_model_is_one_on_the_disk(
    two_ranks: Ranks, text: list[str], tmp_path: Path, losses: list[float], failing: int, best: int, left: list[int]
) -> None:
    settings = [*TWO, *text, "training.max_steps=4", "training.eval_steps=1", "training.load_best_model_at_end=true"]
    settings += ["training.save_strategy=no", "training.save_pretrained=true", "training.save_total_limit=1"]
    errors = two_ranks(_without_a_save, str(tmp_path), settings, losses, failing)
    if failing == 4:
        assert "came to step 4, but not all of it was written: the disk is full at step 4" in errors[0]
    assert len(set(errors)) == 1 and bool(errors[0]) == (failing == 4), errors
    assert json.loads((tmp_path / "summary.json").read_text())["best_step"] == best
    assert list(map(step_of, CheckpointManager(tmp_path).list())) == left
    # What the run has exported, and what a person exports later.
    saved, out = weights(tmp_path, best), tmp_path / "out"
    assert CliRunner().invoke(cli.app, ["export", str(tmp_path), "--out", str(out)]).exit_code == 0
    for folder in (tmp_path / "model", out):
        for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
            assert "experts" in name or torch.equal(value, saved[f"model/{name}"]), name
    # With a disk that takes it, the run ends as it should have.
    again = [*settings, "training.resume_from_checkpoint=auto"]
    if failing == 4:
        assert start_two(two_ranks, tmp_path, again) == [""] * 2
        assert step_of(CheckpointManager(tmp_path).list()[-1]) == 4


def test_each_epoch_is_evaluated_and_saved(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    epochs = ["training.max_steps=none", "training.num_train_epochs=3", "data.max_bytes=2000", "data.eval_fraction=0.2"]
    epochs += ["training.eval_strategy=epoch", "training.save_strategy=epoch", "training.save_total_limit=none"]
    assert start_two(two_ranks, tmp_path / "run", [*text, *epochs]) == [""] * 2
    last = max(records(tmp_path / "run"))
    ends = [math.ceil(last * epoch / 3) for epoch in (1, 2, 3)]
    evaluated, saved = records(tmp_path / "run", "eval"), records(tmp_path / "run", "checkpoint")
    assert len(evaluated) == 4 and len(saved) == 3
    for found in (sorted(evaluated)[1:], sorted(saved)):
        assert all(abs(step - end) <= 1 for step, end in zip(found, ends, strict=True)), (found, ends)
