"""Checkpoints and failures: formulas against drawn failures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from carpool.planner.simulator.goodput import GPU_MTBF_HOURS, HOUR, Failures

MANY = Failures.of_gpus(16384, GPU_MTBF_HOURS, checkpoint=60.0, restart=600.0)


def test_a_large_run() -> None:
    assert MANY.mtbf == pytest.approx(3.093 * HOUR, rel=1e-3) and MANY.per_day == pytest.approx(419 / 54)
    assert MANY.young == pytest.approx(math.sqrt(2 * 60 * MANY.mtbf))


@pytest.mark.parametrize("interval", [300.0, MANY.young, 3 * HOUR])
@pytest.mark.parametrize("failures", [MANY, Failures(2000.0, 200.0, 900.0)])
def test_drawn_failures_agree(failures: Failures, interval: float) -> None:
    sampled, error = failures.sampled_goodput(interval, checkpoints=4000)
    assert abs(sampled - failures.goodput(interval)) < 4 * error
    assert error < 0.05 * sampled


@pytest.mark.parametrize("failures", [MANY, Failures(2000.0, 200.0, 900.0)])
def test_dalys_interval_is_the_best(failures: Failures) -> None:
    intervals = np.geomspace(30, 30_000, 2000)
    best = max(map(failures.goodput, intervals))
    assert failures.goodput(failures.daly) == pytest.approx(best, rel=2e-4)
    assert failures.goodput(failures.young) <= failures.goodput(failures.daly) + 1e-9


def test_nothing_gets_done_where_failures_come_too_fast() -> None:
    assert Failures(1.0, 60.0, 2000.0).goodput(100.0) == 0.0
    assert Failures(10.0, 60.0, 1.0).daly == 10.0
    with pytest.raises(ValueError, match="must be positive"):
        Failures(0.0, 60.0, 1.0)
    with pytest.raises(ValueError, match=r"one of 4,096 GPUs fails every .* s, .* nothing would be trained"):
        Failures.of_gpus(4096, 1e-3, 60.0, 600.0)
