"""A dry run and a run say how long it takes and what it costs: predicted, or, where nothing is, once it is measured."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run
from carpool.train.plan.time_and_cost import describe_left
from carpool.train.run.best_model import due_times, is_due
from carpool.train.run.run import train
from tests.ranks import Ranks
from tests.train.test_loop import MODEL

BIG = ["model.config=qwen3-30b-a3b", "data.sequence_length=2048", "training.per_device_train_batch_size=1"]


def seconds(text: str) -> float:
    words = text.split()
    units = {"s": 1, "min": 60, "h": 3600}
    return sum(float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


def test_a_dry_run_says_hours_and_what_they_cost() -> None:
    words = [*BIG, "training.max_steps=50_000", "parallelism.num_ranks=16", "parallelism.price_per_device_hour=2.5"]
    text = dry_run(load_config(None, words), gpu="h100")
    step = re.search(r"time of a step: ([\d,]+) ms", text)
    run = re.search(
        r"time of the run: (\d+ h \d+ min) \((.+?) to (.+?)\) for 50,000 steps, ([\d.,]+) device-hours", text
    )
    assert step and run, text
    expected = 50 * float(step[1].replace(",", ""))
    assert seconds(run[1]) == pytest.approx(expected, rel=0.02) and seconds(run[2]) < expected < seconds(run[3])
    hours = float(run[4].replace(",", ""))
    assert hours == pytest.approx(16 * expected / 3600, rel=0.01)
    cost = re.search(r"which cost ([\d.,]+) at 2\.5 each; evaluations and checkpoints come on top", text)
    assert cost and float(cost[1].replace(",", "")) == pytest.approx(2.5 * hours, rel=1e-3)
    epochs = dry_run(load_config(None, [*BIG, "training.num_train_epochs=2", "parallelism.num_ranks=16"]), gpu="h100")
    assert "time of the run: known once the data is read" in epochs and "which cost" not in epochs


@pytest.mark.parametrize(
    ("words", "gpu", "why"),
    [(MODEL, None, "the model of costs is of GPUs"), ([*BIG, "training.freeze=experts"], "h100", "train the whole")],
)
def test_what_is_not_predicted_is_said(words: list[str], gpu: str | None, why: str) -> None:
    text = dry_run(load_config(None, [*words, "parallelism.num_ranks=16"]), gpu=gpu)
    assert "time of a step: not predicted, because" in text and why in text
    assert "the run says it after 10 steps" in text and "time of the run" not in text


@pytest.mark.parametrize(("strategy", "every"), [("steps", 4), ("steps", None), ("epoch", None), ("no", 4)])
@pytest.mark.parametrize("last", [12, 13])
def test_how_often_something_is_due(strategy: str, every: int | None, last: int) -> None:
    for step in range(last):
        due = [one for one in range(step + 1, last + 1) if is_due(strategy, every, one, 9 / 7) or one == last]
        found = due_times(strategy, every, step, last, 9 / 7)
        # Two epochs end within some steps.
        assert found == len(due) if strategy != "epoch" else found >= len(due)


def test_what_is_left() -> None:
    assert describe_left(1, 9.0, {"evaluation": (1, 1.0), "checkpoint": (1, None)}, 1, None) == (
        "time left: 10 s: 1 step of 9,000 ms, 1 evaluation of 1.0 s (measured); without 1 checkpoint, not measured yet"
    )
    text = describe_left(100, 36.0, {"evaluation": (10, 360.0), "checkpoint": (3, None)}, 8, 2.0)
    assert text == (
        "time left: 2 h 0 min: 100 steps of 36,000 ms, 10 evaluations of 360.0 s (measured), 16.00 device-hours, which "
        "cost 32.00 at 2 each; without 3 checkpoints, not measured yet"
    )


def said_by(words: list[str]) -> str:
    """On a rank: train; what it says."""
    with redirect_stdout(StringIO()) as text:
        train(load_config(None, words), command="test")
    return text.getvalue()


def test_a_run_says_what_it_measured(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    words = [
        *MODEL, *text, "training.max_steps=24", "training.save_steps=16", f"training.output_dir={tmp_path / 'run'}",
        "parallelism.price_per_device_hour=3",
    ]  # fmt: skip
    said = two_ranks(said_by, words)[0]
    assert "time of a step" not in said
    first, second = re.findall(r"time left: .*", said)
    # After step 10, the pauses at 12, 15, ... 24; after the checkpoint of step 16, that at the end.
    assert re.search(r"13 steps of [\d,]+ ms", first) and "without 2 checkpoints, not measured yet" in first
    assert re.search(r"8 steps of [\d,]+ ms", second) and "without" not in second and " at 3 each" in second
