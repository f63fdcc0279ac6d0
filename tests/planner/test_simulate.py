"""Steps of many ranks: by hand, against a plain sum of maxima, and what goes wrong."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from carpool.planner.simulator.goodput import GPU_MTBF_HOURS, HOUR, Failures
from carpool.planner.simulator.simulate import drawn_seconds, lost_port, sampled, simulate, slow_link, slow_rank
from carpool.planner.step.events import execute
from tests.planner.step_problem import ATTENTION, EXPERTS, REDUCTION, RIDE, balanced, build


def test_ranks_that_are_alike() -> None:
    step = build(16)
    routing = sampled(step, None, stretch=0.0)
    assert execute(step.graph, 16, drawn_seconds(step, routing)).step == pytest.approx(balanced())


def test_a_step_is_the_sum_over_layers_of_the_maximum_over_ranks() -> None:
    """One group of four ranks, so every layer's experts and rides are those of its slowest rank."""
    step = build(4)
    routing = sampled(step, None)
    took = REDUCTION + 6 * ATTENTION
    for layer in range(3):
        load, rows = routing.load_R(layer).max(), routing.rows_R(layer).max()
        took += 2 * (EXPERTS * load + 2 * RIDE * (0.1 + 0.9 * rows))
    found = execute(step.graph, 4, drawn_seconds(step, routing))
    # The last combine of a layer and the attention of the next have no meeting between them, but none of them differs.
    assert found.step == pytest.approx(took, rel=1e-6)
    assert found.step > balanced() * 1.001


def test_what_goes_wrong() -> None:
    step = build(32)
    routing = sampled(step, None, stretch=0.0)

    def took(factor: object) -> float:
        return execute(step.graph, 32, drawn_seconds(step, routing, factor)).step - balanced()  # type: ignore[arg-type]

    assert took(slow_rank(step, 0.8)) == pytest.approx(6 * (ATTENTION + EXPERTS) * 0.25)
    assert took(slow_link(step, 0.5)) == pytest.approx(6 * 2 * RIDE + REDUCTION)
    # Rides stay inside a node of 8, the reduction does not.
    assert took(lost_port(step)) == pytest.approx(REDUCTION / 7)


def test_scaling_and_troubles() -> None:
    found = simulate(build, 64, failures=Failures(36000.0, 60.0, 300.0))
    assert [size.gpus for size in found.sizes] == [4, 16, 64]
    assert all(size.balanced == pytest.approx(balanced()) for size in found.sizes)
    drawn = [size.drawn for size in found.sizes]
    # More ranks meet, so the slowest of them is slower; the routing is drawn, so this holds of the ends only.
    assert drawn[0] < drawn[-1] and min(drawn) > balanced()
    assert found.sizes[-1].efficiency == pytest.approx(drawn[0] / drawn[-1])
    assert found.sizes[-1].low == pytest.approx(drawn[-1] * (0.9 * (balanced() - REDUCTION) + REDUCTION) / balanced())
    assert found.trouble_gpus == 64
    by_name = {trouble.what.split(":")[0]: trouble for trouble in found.troubles}
    assert by_name["experts as drawn"].longer == pytest.approx(0.0)
    assert by_name["balanced experts"].longer < 0 < by_name["imbalance 4 times as large"].longer
    assert by_name["imbalance 2 times as large"].longer < by_name["imbalance 4 times as large"].longer
    assert sum(found.path.values()) == pytest.approx(found.sizes[-1].drawn)
    assert sum(found.exposed.values()) == pytest.approx(found.sizes[-1].drawn)
    record = json.loads(json.dumps(found.record()))
    assert record["tokens_per_second_with_failures"] < record["tokens_per_second"]


def test_sizes_that_the_degrees_do_not_divide() -> None:
    assert [size.gpus for size in simulate(build, 48).sizes] == [12, 48]
    with pytest.raises(ValueError, match="30 GPUs cannot be divided by 4"):
        simulate(build, 30)
    with pytest.raises(ValueError, match="10 GPUs cannot be divided by 4"):
        simulate(build, 24, sizes=[10])


def test_one_rank_is_simulated_as_many_are() -> None:
    found = simulate(lambda gpus: build(gpus, ep=1), 4, sizes=[1])
    assert [size.gpus for size in found.sizes] == [1, 4]
    assert found.sizes[0].drawn == pytest.approx(balanced())


def test_a_pipeline_of_many_ranks() -> None:
    found = simulate(lambda gpus: build(gpus, layers=4, stages=2), 16)
    assert found.execution.end_SR.shape == (2, 8)
    assert found.sizes[-1].balanced == pytest.approx(balanced(4))


def test_sixteen_thousand_ranks_take_seconds() -> None:
    """48 layers; the bound is loose, for machines that are busy."""
    start = time.process_time()
    step = build(16384, layers=48, ep=8, num_experts=64)
    routing = sampled(step, None)
    found = execute(step.graph, step.ranks, drawn_seconds(step, routing), kept=(0,))
    assert found.step > balanced(48)
    assert time.process_time() - start < 10
    assert np.ptp(found.end_SR) == 0


# -- failures ---------------------------------------------------------------------------------------------------------

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
