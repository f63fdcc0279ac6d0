"""Bubbles of schedules: on paper, and of ranks that sleep."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bubbles import Bubble, Measured, formula, played
from tests.ranks import Ranks


def test_bubbles_of_orders_are_the_published_ones() -> None:
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        assert played(schedule, 4, 8, (1.0, 1.5, 0.5)) == pytest.approx(formula(schedule, 4, 8))
    # ZBV: (p - 1) F / 2 of 3 m F and that (arXiv 2401.10241, section 6).
    assert formula("ZBVZeroBubble", 4, 8) == pytest.approx(1.5 / 25.5)


def bubble(schedule: str) -> Measured:
    one = Bubble(schedule, 4, torch.device("cpu"), sleep=4.0)
    return one.summary([one.step() for _ in range(2)][1:])


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_ranks_wait_at_least_as_long_as_on_paper(two_ranks: Ranks, schedule: str) -> None:
    found = two_ranks(bubble, schedule)[0]
    assert found.played - 0.05 < found.measured < 0.7
    # Forward 4 ms; backward 8 ms in all, of which weight gradients are half where they are apart.
    forward, inputs, weights = found.seconds
    assert forward >= 4e-3 and inputs + weights >= 8e-3 and (weights >= 4e-3) == (schedule == "DualPipeV")
