"""The event graph and steps of many ranks: small graphs by hand, many ranks against a plain loop and a plain sum of
maxima, and what goes wrong."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict

import numpy as np
import pytest

from carpool.planner.simulator.goodput import GPU_MTBF_HOURS, HOUR, Failures
from carpool.planner.simulator.simulate import drawn_seconds, lost_port, sampled, simulate, slow_link, slow_rank
from carpool.planner.step.clock import Clock, Tape
from carpool.planner.step.events import IDLE, KINDS, Event, Execution, Graph, Group, execute
from tests.planner.step_problem import ATTENTION, EXPERTS, REDUCTION, RIDE, balanced, build


def test_streams_run_beside_each_other_and_in_order() -> None:
    graph = Graph()
    first = graph.add("first", "dense", 2.0)
    ride = graph.add("ride", "dispatch", 3.0, (first,))
    graph.add("beside", "attention", 2.0)
    graph.add("experts", "experts", 1.0, (ride,))
    found = execute(graph)
    assert found.arrive_EK[:, 0].tolist() == [0, 2, 2, 5] and found.end_EK[:, 0].tolist() == [2, 5, 4, 6]
    assert found.step == 6.0
    assert [one.event.name for one in found.path] == ["first", "ride", "experts"]
    assert found.path_seconds() == {"dense": 2.0, "dispatch": 3.0, "experts": 1.0}
    # The ride is exposed from 4 to 5; before that it is hidden.
    assert found.exposed_seconds() == {"attention": 2.0, "dense": 2.0, "experts": 1.0, "dispatch": 1.0, IDLE: 0.0}
    graph = Graph()
    host = graph.add("host", "host", 2.0)
    graph.add("dense", "dense", 1.0, (host,))
    assert execute(graph).exposed_seconds() == {"dense": 1.0, "host": 2.0, IDLE: 0.0}
    graph = Graph()
    other = graph.add("dense", "dense", 2.0, stage=1)
    graph.add("dense", "dense", 1.0, (other,))
    assert execute(graph).exposed_seconds(stage=0) == {"dense": 1.0, IDLE: 2.0}


def test_a_step_is_the_sum_of_maxima() -> None:
    """Each rank has 7 seconds of work, but they meet between its parts."""
    graph = Graph()
    attention = graph.add("attention", "attention", 2.0)
    dispatch = graph.add("dispatch", "dispatch", 1.0, (attention,), group=Group(2))
    graph.add("experts", "experts", 3.0, (dispatch,))
    slow = {"attention": np.array([2.0, 3.0]), "experts": np.array([4.0, 3.0]), "dispatch": 1.0}
    assert execute(graph).step == 6.0 == execute(graph, ranks=2).step
    found = execute(graph, ranks=2, seconds=lambda event: slow[event.kind])
    assert found.step == 8.0
    assert found.end_SR.tolist() == [[8.0, 7.0]]
    assert found.arrive_EK[1].tolist() == [2.0, 3.0] and found.end_EK[1].tolist() == [4.0, 4.0]
    assert [(one.event.name, one.rank, one.seconds) for one in found.path] == [
        ("attention", 1, 3.0), ("dispatch", 1, 1.0), ("experts", 0, 4.0),
    ]  # fmt: skip
    # Rank 0 waits a second for rank 1, and the ride takes another.
    assert found.exposed_seconds(rank=0) == {"attention": 2.0, "experts": 4.0, "dispatch": 2.0, IDLE: 0.0}
    assert found.exposed_seconds(rank=1)[IDLE] == 1.0


def test_groups_are_axes() -> None:
    """Of 8 ranks, those that are `stride` apart meet."""
    took_R = np.arange(8.0)
    for group, ends in (
        (Group(2), [1, 1, 3, 3, 5, 5, 7, 7]),
        (Group(2, 4), [4, 5, 6, 7] * 2),
        (Group(4, 2), [6, 7] * 4),
        (None, range(8)),
    ):
        graph = Graph()
        graph.add("one", "reduction", 0.0, group=group)
        assert execute(graph, 8, lambda _: took_R).end_EK[0].tolist() == list(ends)
    with pytest.raises(ValueError, match="groups of 4 ranks, 1 apart, do not divide 6 ranks"):
        execute(_one_meeting(), 6)


def _one_meeting() -> Graph:
    graph = Graph()
    graph.add("layers.0::forward::dispatch", "dispatch", 1.0, group=Group(4))
    return graph


def _random_graph(rng: np.random.Generator, events: int, stages: int) -> Graph:
    graph = Graph()
    for number in range(events):
        after = rng.choice(number, size=min(number, 3), replace=False).tolist() if number else []
        group = [None, Group(2), Group(3, 2), Group(6), Group(2, 3), Group(12)][rng.integers(6)]
        kind = KINDS[rng.integers(len(KINDS))]
        graph.add(f"event {number}", kind, 1.0, after, group=group, stage=int(rng.integers(stages)))
    return graph


def _plain_loop(graph: Graph, ranks: int, took_ER: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and ends of all events, one rank after the other."""
    arrive_ER, end_ER = np.zeros_like(took_ER), np.zeros_like(took_ER)
    for number, event in enumerate(graph.events):
        stream = event.stage, event.stream
        before = [n for n, one in enumerate(graph.events[:number]) if (one.stage, one.stream) == stream]
        for rank in range(ranks):
            arrive_ER[number, rank] = max((end_ER[one, rank] for one in (*event.after, *before)), default=0.0)
        groups: dict[object, list[int]] = defaultdict(list)
        for rank in range(ranks):
            size, stride = event.group or (1, 1)
            groups[rank // (size * stride), rank % stride].append(rank)
        for members in groups.values():
            begin = max(arrive_ER[number, rank] for rank in members)
            end_ER[number, members] = begin + max(took_ER[number, rank] for rank in members)
    return arrive_ER, end_ER


@pytest.mark.parametrize("seed", range(6))
def test_many_ranks_are_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = _random_graph(rng, events=25, stages=1 + seed % 3)
    took_ER = rng.random((25, 12))
    numbers = {event: number for number, event in enumerate(graph.events)}

    def seconds(event: Event) -> np.ndarray:
        return took_ER[numbers[event]]

    found = execute(graph, 12, seconds)
    arrive_ER, end_ER = _plain_loop(graph, 12, took_ER)
    np.testing.assert_allclose(found.arrive_EK, arrive_ER)
    np.testing.assert_allclose(found.end_EK, end_ER)
    assert found.step == pytest.approx(end_ER.max())
    _check_path(found)
    few = execute(graph, 12, seconds, kept=(7, 2))
    np.testing.assert_allclose(few.end_EK, end_ER[:, [7, 2]])
    assert few.path == found.path
    for rank in (2, 7):
        shares = few.exposed_seconds(rank=rank)
        assert shares == pytest.approx(found.exposed_seconds(rank=rank))
        assert sum(shares.values()) == pytest.approx(found.step)


@pytest.mark.parametrize("seed", range(3))
def test_one_rank_stands_for_all(seed: int) -> None:
    """Ranks that are alike take what one of them takes."""
    rng = np.random.default_rng(seed)
    graph = _random_graph(rng, events=40, stages=2)
    took = {event: rng.random() for event in graph.events}
    one, many = execute(graph, 1, took.__getitem__), execute(graph, 12, took.__getitem__)
    np.testing.assert_allclose(many.end_EK, np.broadcast_to(one.end_EK, (40, 12)))
    _check_path(one)
    assert [on.event for on in one.path] == [on.event for on in many.path]


def _check_path(found: Execution) -> None:
    """It has no gaps: its events add up to the step."""
    assert sum(found.path_seconds().values()) == pytest.approx(found.step)


def test_a_program_is_what_was_recorded_again_and_again() -> None:
    """Random events of which three copies follow each other, with ends that others and the outside wait for."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        kinds, number = ("dense", "dispatch", "all-gather", "offload"), int(rng.integers(1, 40))
        events = [
            (str(rng.choice(kinds)), float(rng.random() * (rng.random() < 0.8)), rng.integers(0, 2 + i, 3).tolist())
            for i in range(number)
        ]
        wanted = [2 + int(one) for one in rng.integers(0, number, 2)]
        tape = Tape(2)
        for i, (kind, took, after) in enumerate(events):
            assert tape.add("", kind, took, after, stage=1) == 2 + i
        program = tape.program(wanted)
        graph, clock = Graph(), Clock()
        first = [[one.add("first", "dense", 0.3), one.add("second", "send", 0.2, stage=1)] for one in (graph, clock)]
        for _ in range(3):
            numbers = list(first[0])
            for kind, took, after in events:
                numbers.append(graph.add("", kind, took, [numbers[one] for one in after], stage=1))
            first = [[numbers[one] for one in wanted], [*clock.run(program, 1, [(one,) for one in first[1]])]]
            ends = execute(graph).end_EK[first[0], 0]
            assert clock.step == pytest.approx(execute(graph).step, rel=1e-12)
            assert [clock._end[one] for one in first[1]] == pytest.approx(ends.tolist(), rel=1e-12)


def test_a_step_is_the_sum_over_layers_of_the_maximum_over_ranks() -> None:
    step = build(16)
    routing = sampled(step, None, stretch=0.0)
    assert execute(step.graph, 16, drawn_seconds(step, routing)).step == pytest.approx(balanced())
    # One group of four ranks, so every layer's experts and rides are those of its slowest rank.
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


def test_other_numbers_of_ranks() -> None:
    assert [size.gpus for size in simulate(build, 48).sizes] == [12, 48]
    with pytest.raises(ValueError, match="30 GPUs cannot be divided by 4"):
        simulate(build, 30)
    with pytest.raises(ValueError, match="10 GPUs cannot be divided by 4"):
        simulate(build, 24, sizes=[10])
    found = simulate(lambda gpus: build(gpus, ep=1), 4, sizes=[1])
    assert [size.gpus for size in found.sizes] == [1, 4]
    assert found.sizes[0].drawn == pytest.approx(balanced())
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


MANY = Failures.of_gpus(16384, GPU_MTBF_HOURS, checkpoint=60.0, restart=600.0)


def test_failures_of_large_and_hopeless_runs() -> None:
    assert MANY.mtbf == pytest.approx(3.093 * HOUR, rel=1e-3) and MANY.per_day == pytest.approx(419 / 54)
    assert MANY.young == pytest.approx(math.sqrt(2 * 60 * MANY.mtbf))
    assert Failures(1.0, 60.0, 2000.0).goodput(100.0) == 0.0
    assert Failures(10.0, 60.0, 1.0).daly == 10.0
    with pytest.raises(ValueError, match="must be positive"):
        Failures(0.0, 60.0, 1.0)
    with pytest.raises(ValueError, match=r"one of 4,096 GPUs fails every .* s, .* nothing would be trained"):
        Failures.of_gpus(4096, 1e-3, 60.0, 600.0)


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
