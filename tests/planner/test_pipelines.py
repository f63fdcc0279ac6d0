"""Orders of pipelines: those of PyTorch, and bubbles as the papers have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from carpool.parallel.schedules import SCHEDULES, in_flight, in_pairs
from carpool.planner.step.events import Execution, Graph, execute
from carpool.planner.step.pipelines import Action, add_pipeline, alternate, in_turns, orders, pipeline, turns

F, I, W = 3.0, 4.0, 2.0  # noqa: E741


def _torch_order(schedule: str, stages: int, micro_batches: int, chunks: int, stage: int) -> list[tuple[Action, ...]]:
    rounds = max(1, micro_batches // stages)
    one = SimpleNamespace(
        pp_group_size=stages, n_local_stages=chunks, _n_microbatches=micro_batches, num_stages=stages * chunks,
        microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    found = getattr(torch_schedules, f"Schedule{schedule}")._calculate_single_rank_operations(one, stage)
    return [tuple(map(_action, one.sub_actions or (one,))) for one in found if one is not None]


def _action(one: torch_schedules._Action) -> Action:
    return Action(one.computation_type.value, one.stage_index, one.microbatch_index)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("Interleaved1F1B", 1), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2),
     ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 6), (4, 8), (5, 13), (5, 3)])
def test_orders_are_pytorchs(schedule: str, chunks: int, stages: int, micro_batches: int) -> None:
    if schedule == "DualPipeV" and micro_batches < 2 * stages:
        with pytest.raises(ValueError, match=f"needs at least {2 * stages} micro-batches"):
            orders(schedule, stages, micro_batches, chunks)
    elif schedule.startswith("Interleaved") and micro_batches % max(1, micro_batches // stages):
        with pytest.raises(ValueError, match="take a multiple of 2, not 13"):
            orders(schedule, stages, micro_batches, chunks)
    else:
        found = orders(schedule, stages, micro_batches, chunks, schedule == "DualPipeV")
        for stage in range(stages):
            assert found[stage] == _torch_order(schedule, stages, micro_batches, chunks, stage)


def test_orders_by_hand() -> None:
    text = ["".join(f" {one.kind}{one.micro_batch}" for (one,) in order) for order in orders("1F1B", 3, 4)]
    assert text == [" F0 F1 F2 B0 F3 B1 B2 B3", " F0 F1 B0 F2 B1 F3 B2 B3", " F0 B0 F1 B1 F2 B2 F3 B3"]
    # Chunks c and 2 + c of stage c; a pair is in brackets, and its forward comes first.
    text = []
    for order in orders("Interleaved1F1B", 2, 4, 2, paired=True):
        parts = [" ".join(f"{one.kind}{one.chunk}.{one.micro_batch}" for one in actions) for actions in order]
        text.append(" ".join(f"[{part}]" if " " in part else part for part in parts))
    assert text == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 [F0.3 B2.0] [F2.2 B2.1] [F2.3 B0.0] B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 [F3.1 B3.0] [F1.2 B3.1] [F1.3 B1.0] [F3.2 B1.1] [F3.3 B3.2] B3.3 B1.2 B1.3",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("paired", [False, True])
def test_micro_batches_in_flight(schedule: str, paired: bool) -> None:
    """Begun, and their backward not done; what a pair begins is counted before what it ends."""
    chunks = SCHEDULES[schedule].stages
    for rank, order in enumerate(orders(schedule, 4, 16, chunks, paired)):
        now, most = 0, 0.0
        for actions in order:
            now += sum(one.kind == "F" for one in actions)
            most = max(most, now / chunks)
            now -= sum(one.kind in "BI" for one in actions)
        told = in_flight(schedule, 4, 16, paired, rank)
        assert most == told or (SCHEDULES[schedule].splits and most < told)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("paired", [False, True])
def test_everything_is_done_once(schedule: str, paired: bool) -> None:
    chunks = SCHEDULES[schedule].stages
    done = Counter(one for order in orders(schedule, 4, 8, chunks, paired) for both in order for one in both)
    assert set(done.values()) == {1}
    pieces = Counter((kind, one.chunk) for one in done for kind in ("IW" if one.kind == "B" else one.kind))
    assert pieces == {(kind, chunk): 8 for kind in "FIW" for chunk in range(4 * chunks)}


def _run(
    schedule: str, stages: int, micro_batches: int, chunks: int, send: float = 0.0, i: float = I, w: float = W
) -> Execution:
    def work(graph: Graph, action: Action, stage: int, after: tuple[int, ...]) -> Iterator[int]:
        for kind in "IW" if action.kind == "B" else action.kind:
            took = {"F": F, "I": i, "W": w}[kind] / chunks
            after = (graph.add(f"{action}", "dense", took, after, stage=stage),)
            yield after[0]

    graph = Graph()
    add_pipeline(graph, pipeline(schedule, stages, micro_batches, chunks), in_turns(work), send)
    return execute(graph)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (3, 6), (4, 8)])
def test_bubbles_are_the_formulas(p: int, m: int) -> None:
    """Seconds in which a stage does nothing, on top of `m` micro-batches."""
    whole = F + I + W
    bubbles = {name: _run(name, p, m, 1).step - m * whole for name in ("GPipe", "1F1B", "InterleavedZeroBubble")}
    assert bubbles["GPipe"] == bubbles["1F1B"] == pytest.approx((p - 1) * whole)
    share = bubbles["1F1B"] / _run("1F1B", p, m, 1).step
    assert share == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        interleaved = _run("Interleaved1F1B", p, m, v).step
        assert (interleaved - m * whole) / interleaved == pytest.approx((p - 1) / (v * m + p - 1))
    equal = {"i": F, "w": F}
    assert _run("InterleavedZeroBubble", p, m, 1, **equal).step - 3 * m * F == pytest.approx((p - 1) * F)
    if m >= 2 * p - 1:
        # Of the first stage: none but for the sends that nobody has here.
        found = _run("ZBVZeroBubble", p, m, 2, **equal)
        assert found.step - 3 * m * F == pytest.approx((p - 1) * F / 2)


def test_sends_run_beside() -> None:
    """The first micro-batch's way down and up has p - 1 sends each; others hide where a stage has something to do."""
    assert _run("1F1B", 3, 1, 1, send=0.5).step == 3 * (F + I + W) + 4 * 0.5
    assert _run("GPipe", 3, 4, 1, send=0.5).step == (4 + 2) * (F + I + W) + 4 * 0.5


def test_a_pair_takes_turns() -> None:
    """Rides of one half run beside the computation of the other."""

    def half(graph: Graph) -> Iterator[int]:
        after: tuple[int, ...] = ()
        for kind in ("attention", "dispatch", "experts", "combine"):
            after = (graph.add(kind, kind, 1.0, after),)
            yield after[0]

    graph = Graph()
    assert list(alternate(half(graph), half(graph))) == list(range(8))
    assert [event.kind for event in graph.events[:4]] == ["attention", "attention", "dispatch", "dispatch"]
    assert execute(graph).step == 5.0


@pytest.mark.parametrize(("paired", "seconds"), [(False, 20.0), (True, 15.0)])
def test_a_pair_by_hand(paired: bool, seconds: float) -> None:
    """One stage, two micro-batches: F0, then F1 beside B0, then B1. Time goes to the right:

    computes   A0 .  E0 A1 .  e0 e0 E1 a0 a0 e1 e1 .  a1 a1
    rides      .  D0 .  C0 d0 D1 .  c0 C1 d1 .  .  c1 .  .
    """
    pieces = {
        "F": (("attention", 1.0), ("dispatch", 1.0), ("experts", 1.0), ("combine", 1.0)),
        "B": (("dispatch", 1.0), ("experts", 2.0), ("combine", 1.0), ("attention", 2.0)),
    }

    def work(graph: Graph, action: Action, stage: int, after: tuple[int, ...]) -> Iterator[int]:
        for kind, took in pieces[action.kind]:
            after = (graph.add(f"{action}", kind, took, after, stage=stage),)
            yield after[0]

    graph = Graph()
    (order,) = orders("1F1B", 1, 2)
    if paired:
        order = in_pairs([one for (one,) in order], lambda one: one.kind)
    add_pipeline(graph, turns("1F1B", 1, [order]), in_turns(work), 0.0)
    assert execute(graph).step == seconds


@pytest.mark.parametrize(
    ("schedule", "chunks", "says"),
    [("1f1b", 1, "known are GPipe, 1F1B,"), ("1F1B", 2, "needs 1 chunk of"), ("DualPipeV", 3, "needs 2 chunks")],
)
def test_what_no_schedule_can_have(schedule: str, chunks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        orders(schedule, 2, 8, chunks)
