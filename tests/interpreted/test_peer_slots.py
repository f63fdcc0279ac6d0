"""Spare slots over peer memory, in Triton's interpreter: loads, fetched parameters and gradients are bit by bit those
of `CollectiveLinks`, over many layers and two rides at a time. test_ride.py has whole rides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from carpool import ExpertLayout
from carpool.metrics.counters import Meter, Traffic
from carpool.replicas import node_slots, slot_links, slots
from carpool.replicas.slot_links import CollectiveLinks, SlotLinks
from carpool.replicas.slot_plan import Costs, SlotPlan, plan_slots
from carpool.train.steps.capacity import full_capacity, grow_if_short
from carpool.transport import BufferOverflowError
from carpool.transport.nvlink.peer_slots import SETS
from tests.interpreted.emulated import Meeting, connect, emulate, on_threads
from tests.interpreter_rounding import rounding_as_on_a_gpu
from tests.layouts import EXPERTS, layout_of

LAYERS = 5
# Shapes and dtypes of an expert's parameters: matrices, a bias, adapters, codes and scales; rows of odd bytes too.
BF16 = (((6, 16), torch.bfloat16), ((16, 3), torch.bfloat16), ((5,), torch.bfloat16), ((2, 16), torch.bfloat16))
FP32 = (((4, 40), torch.float32), ((7,), torch.float32), ((3, 5), torch.bfloat16))
CODES = (((3, 7), torch.uint8), ((5,), torch.float16), ((1,), torch.float32), ((8, 4), torch.uint8))
Rows = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (100 * numbers).to(dtype) if dtype.is_floating_point else numbers.mul(50).to(torch.int16).to(dtype)


def plans(layout: ExpertLayout, spare: int, name: str) -> Callable[[torch.Tensor], SlotPlan]:
    """What makes a layer's plan from its loads."""
    home_E = torch.tensor([rank for rank, _ in layout.home_of])
    ranks = layout.num_ranks

    def plan(load_WE: torch.Tensor) -> SlotPlan:
        if name == "planned":
            return plan_slots(load_WE, home_E, spare, Costs(limit=1100))
        expert_WS = torch.full((ranks, spare), -1, dtype=torch.int32)
        if name == "everywhere":
            for rank in range(ranks):
                if rank != home_E[0]:
                    expert_WS[rank, -1] = 0
        return SlotPlan(expert_WS, torch.zeros_like(expert_WS), load_WE.sum(1))

    return plan


def work(links: SlotLinks, layout: ExpertLayout, rank: int, spare: int, fields: Rows, name: str) -> list[torch.Tensor]:
    """All that a rank gets in forwards of two micro-batches and their backwards, empty slots left out."""
    make, held, got = plans(layout, spare, name), len(layout.homes[rank]), []
    handles, homes_of = [], []

    def take(rows: list[torch.Tensor], plan: SlotPlan) -> list[torch.Tensor]:
        assert all(len(one) == spare for one in rows)
        return [one[plan.expert_WS[rank] >= 0].clone() for one in rows]

    for layer in range(LAYERS):
        under_way = []
        for half in range(2):
            seed = 1000 * layer + 100 * half
            load_E = draw((EXPERTS,), torch.float32, seed + rank).abs().int() * (rank != 1)
            load_WE = links.gather_loads(load_E)
            plan = make(load_WE)
            got += [load_WE, plan.expert_WS]
            homes = [draw((held, *shape), dtype, seed + 10 * i + rank) for i, (shape, dtype) in enumerate(fields)]
            handle = links.take(plan)
            handles.append((handle, plan))
            homes_of.append(homes)
            under_way.append((links.fetch(homes, handle), plan))
        # Either half may be first.
        for fetched, plan in under_way[:: 1 if layer % 2 else -1]:
            got += take(fetched.wait(), plan)
            fetched.release()
    for number_of, ((handle, plan), homes) in enumerate(reversed(list(zip(handles, homes_of, strict=True)))):
        fetched = links.fetch(homes, handle)
        got += take(fetched.wait(), plan)
        fetched.release()
        trained = [(shape, dtype) for shape, dtype in fields if dtype.is_floating_point]
        dhomes, dspare = (
            [draw((slots, *shape), d, 7 * number_of + i + 50 * rank + slots) for i, (shape, d) in enumerate(trained)]
            for slots in (held, spare)
        )
        # As products of a transposed matrix are.
        for one in (dhomes, dspare):
            one[0] = one[0].transpose(-1, -2).contiguous().transpose(-1, -2) if one[0].dim() > 2 else one[0]
        got += [one.clone() for one in links.send_home(dhomes, dspare, handle)]
    return got


class Threads:
    """What `CollectiveLinks` needs of `torch.distributed`, among threads. A group is a rank's number."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(ranks, timeout=240), list[Any]([None] * ranks)

    def get_rank(self, group: int) -> int:
        return group

    def exchange(self, given: Any, group: int) -> list[Any]:
        self.given[group] = given
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone

    def all_gather_into_tensor(self, out: torch.Tensor, rows: torch.Tensor, group: int) -> None:
        out.copy_(torch.cat(self.exchange(rows, group)))

    def all_to_all_single(
        self, out: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], group: int, async_op: bool
    ) -> None:
        parts = self.exchange(rows.split(send), group)
        out.copy_(torch.cat([part[group] for part in parts]))
        self.barrier.wait()


def by_collectives(layout: ExpertLayout, task: Callable[[SlotLinks, int], list[torch.Tensor]]) -> list[Any]:
    """The task on threads, over collectives."""
    fake = Threads(layout.num_ranks)
    with (
        mock.patch.object(slot_links, "dist", fake),
        mock.patch.object(slots, "dist", fake),
        mock.patch.object(node_slots, "known_topology", lambda group: None),
    ):
        return on_threads(layout.num_ranks, lambda rank: task(CollectiveLinks(layout, rank), rank))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "layout", "spare", "fields", "name"),
    [
        (2, "contiguous", 1, BF16, "planned"),
        (2, "uneven", 2, CODES, "everywhere"),
        (4, "uneven", 2, BF16, "planned"),
        (4, "permuted", 1, FP32, "everywhere"),
        (4, "contiguous", 2, FP32, "none"),
    ],
)
def test_results_are_those_of_collectives(ranks: int, layout: str, spare: int, fields: Rows, name: str) -> None:
    made = layout_of(layout, ranks)
    want = by_collectives(made, lambda links, rank: work(links, made, rank, spare, fields, name))
    transports = emulate(ranks, 1, capacity=1, row_bytes=16, top_k=1)
    meeting = Meeting(ranks)
    connect(transports, meeting)
    meters = [Meter() for _ in range(ranks)]

    def task(rank: int) -> list[torch.Tensor]:
        return work(transports[rank].slot_links(made, spare, meters[rank]), made, rank, spare, fields, name)

    with rounding_as_on_a_gpu():
        got = on_threads(ranks, task, meeting)
    for theirs, ours in zip(want, got, strict=True):
        assert len(theirs) == len(ours) > 0
        for one, other in zip(theirs, ours, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    if name == "planned":
        assert any((plan >= 0).any() for plan in want[0] if plan.shape == (ranks, spare))
    # Of two halves, each layer's forward and backward.
    assert all(len(meter.milliseconds()["fill"]) == 4 * LAYERS for meter in meters)
    for transport in transports:
        transport.buffers.check()
        assert sorted(map(len, transport.buffers.shared.values())) == [1, 1, SETS]
        assert not any(one.busy for several in transport.buffers.shared.values() for one in several)


def test_a_plan_beyond_the_limit_is_noticed_and_mended_by_growing() -> None:
    """Experts allocate for the limit; where a plan gives a rank more, outputs are NaN on all ranks until a step is
    repeated. Evaluations allocate for any routing."""
    layout, tokens, hidden = ExpertLayout.contiguous(2, 2), 4, 8
    options: dict[str, Any] = {"num_leases": 1, "balance_limit": 1.0}
    transports = emulate(2, 2, capacity=tokens, row_bytes=4 * hidden, top_k=1, **options)
    meeting = Meeting(2)
    connect(transports, meeting)
    x_TH = draw((tokens, hidden), torch.float32, 0)
    nobody = torch.full((2, 1), -1, dtype=torch.int32)

    def ride(rank: int) -> tuple[torch.Tensor, int]:
        transport = transports[rank]
        links = transport.slot_links(layout, 1)
        links.take(SlotPlan(nobody, nobody, torch.tensor([5, 3])))
        # All of rank 0's tokens and one of rank 1's choose expert 0.
        slot_TK = torch.tensor([[0], [0 if rank == 0 else 2], *([[2 * rank]] * 2)], dtype=torch.int32)
        route = transport.plan(slot_TK, torch.ones(tokens, 1), Traffic(2, rank))
        arrivals = transport.dispatch(x_TH, route).wait()
        partial_RH = route.new_partial(hidden, torch.float32, x_TH.device)
        rows = arrivals.tokens.contiguous(route.num_rows)
        partial_RH.copy_(torch.where(arrivals.slot_RJ >= 0, 2 * rows, 0.0))
        return transport.combine(route, partial_RH).wait(), route.num_pairs

    for y_TH, num_pairs in on_threads(2, ride, meeting):
        assert y_TH.isnan().all() and num_pairs == tokens
    for transport in transports:
        assert [bool(one.overflowed()) for one in transport.capacities] == [False, True]
        with pytest.raises(BufferOverflowError, match="one serves 5 choices, and experts allocate for 4"):
            transport.check()
        with full_capacity(transport.capacities):
            assert transport.plan(nobody, torch.ones(2, 1), Traffic(2, 0)).num_pairs == 2 * tokens
        made = grow_if_short(transport.capacities, x_TH.device)
        assert made is not None and made.pairs == 7
        assert grow_if_short(transport.capacities, x_TH.device) is None
    for y_TH, num_pairs in on_threads(2, ride, meeting):
        assert torch.equal(y_TH, 2 * x_TH) and num_pairs == 7
    for transport in transports:
        transport.check()
