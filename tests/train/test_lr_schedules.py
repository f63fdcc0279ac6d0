"""Learning rates are those of Transformers' schedules, and a stable run is ended by a decay in one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from carpool.train.config.schema import TrainingSection
from carpool.train.lr_schedules import LR_SCHEDULES, learning_rate, options_of, register
from tests.ranks import Ranks
from tests.train.test_loop import losses, records, start_two

STEPS, WARMUP = 40, 5
NAMES = [
    ("cosine", {}, {}), ("linear", {}, {}), ("constant_with_warmup", {}, {}),
    ("cosine_with_min_lr", {}, {"min_lr_rate": 0.1}),
    ("cosine_with_restarts", {"num_cycles": 3}, {}), ("polynomial", {"power": 2.0}, {"lr_end": 0.0}),
    ("polynomial", {"power": 0.5}, {"lr_end": 0.1}), ("inverse_sqrt", {}, {}), ("inverse_sqrt", {"timescale": 20}, {}),
    *(("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": kind}, {"min_lr_ratio": least})
      for kind in ("linear", "cosine", "1-sqrt") for least in (0.0, 0.1)),
]  # fmt: skip


def section(**settings: Any) -> TrainingSection:
    return TrainingSection(learning_rate=1.0, warmup_steps=WARMUP, max_steps=STEPS, **settings)


@pytest.mark.parametrize(("name", "options", "theirs"), NAMES)
def test_rates_are_those_of_transformers(name: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    least = float(next(iter(theirs.values()), 0.0))
    settings = section(lr_scheduler_type=name, lr_scheduler_kwargs=options, min_lr_ratio=least)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    other: Any = get_scheduler(name, optimizer, WARMUP, STEPS, {**options, **theirs})
    for step in range(WARMUP, STEPS + 1):  # before, theirs warms up from the minimum in some
        assert learning_rate(step, settings) == pytest.approx(other.lr_lambdas[0](step), abs=1e-12), step
    assert [learning_rate(step, settings) for step in range(1, WARMUP)] == [step / WARMUP for step in range(1, WARMUP)]


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
def test_no_rate_is_below_the_minimum(name: str) -> None:
    rates = [
        learning_rate(step, section(lr_scheduler_type=name, min_lr_ratio=0.4)) for step in range(WARMUP, STEPS + 1)
    ]
    falls = name not in ("constant", "constant_with_warmup")
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.4 if falls else 1.0) and min(rates) >= 0.4 - 1e-12


def test_a_schedule_of_a_plugin() -> None:
    def half(step: int, warmup: int, steps: int, minimum: float, *, share: float = 0.5) -> float:
        return share

    register(half)
    try:
        assert options_of("half") == {"share": float}
        assert learning_rate(7, section(lr_scheduler_type="half", lr_scheduler_kwargs={"share": 0.25})) == 0.25
        with pytest.raises(ValueError, match="must take step, warmup, steps and minimum"):
            register(lambda step: 1.0)
    finally:
        del LR_SCHEDULES._things["half"]


@pytest.mark.timeout(600)
def test_a_decay_ends_a_stable_run(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """One key on the resumed run: until then its losses are as the stable one; killed in it, it goes on."""
    wsd = [*text, "training.lr_scheduler_type=warmup_stable_decay", "training.max_steps=40", "training.eval_steps=none"]
    stable, ended, killed = (tmp_path / name for name in ("stable", "ended", "killed"))
    assert start_two(two_ranks, stable, [*wsd, "training.save_steps=4", "training.stop_at_step=5"]) == [""] * 2
    fork = [*wsd, f"training.resume_from_checkpoint={stable}/checkpoints/step-00000004"]
    decay = ["training.decay_from=4", "training.max_steps=8", "training.lr_scheduler_kwargs.decay_type=linear"]
    assert start_two(two_ranks, ended, [*fork, *decay]) == [""] * 2
    assert start_two(two_ranks, killed, [*fork, *decay, "training.stop_at_step=6"]) == [""] * 2
    again = [*wsd, *decay, "training.resume_from_checkpoint=last"]
    assert start_two(two_ranks, killed, again) == [""] * 2
    rates = [record["learning_rate"] / 5e-3 for record in (records(stable) | records(ended)).values()]
    assert rates == pytest.approx([0.5, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])
    assert losses(killed) == losses(ended) and losses(ended)[5][0] == losses(stable)[5][0]
