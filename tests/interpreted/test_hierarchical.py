"""Rides over two hops, rows of fixed size between nodes and the kernels of `nvlink` inside, in Triton's interpreter.

Each emulated rank is a thread; those of a rail hand rows to each other. Output and every gradient equal those of one
rank that holds all experts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from carpool.activations import ActivationPolicies
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import LayerStats
from carpool.placement import VERBS, predict
from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import NO_HOOKS, RideSetup
from carpool.routing import Routing
from carpool.transport import HierarchicalOptions
from carpool.transport.hierarchical import FixedSizeDedup, Hierarchical
from carpool.transport.multi_hop import Hop, MultiHop
from carpool.transport.token_capacity import NodeCapacity
from tests.interpreted.emulated import Meeting, RideProblem, emulate

TOKENS, TOP_K, SLOTS, HIDDEN, INNER = (7, 0, 5, 9), 3, 2, 16, 12
RANKS, NODES, PER_NODE, MOST = len(TOKENS), 2, 2, max(TOKENS)
EXPERTS = RANKS * SLOTS
FUNCTION = ExpertFunction(make_activation("silu", gated=True))


class Rail:
    """Where the threads of a rail put rows for each other."""

    def __init__(self, meeting: Meeting) -> None:
        self.meet, self.boxes = meeting.meet, {}

    def start(self, own: int, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> Any:
        self.boxes[own] = rows.split(list(send))
        self.meet()
        came = torch.cat([self.boxes[other][own] for other in range(NODES)])
        assert len(came) == sum(receive)
        self.meet()
        return came, None


def two_hops(pieces: int, resend: bool, rows: int) -> tuple[list[Hierarchical], list[Meeting]]:
    """A transport for each rank, and who meets."""
    turn = threading.Lock()
    meetings = [Meeting(NODES, turn) for _ in range(PER_NODE)]
    rails = [Rail(meeting) for meeting in meetings]
    made = []
    options = HierarchicalOptions(MOST).under(Schedule("chunks", pieces), resend).nvlink_inside(NODES)
    for node in range(NODES):
        meeting = Meeting(PER_NODE, turn)
        meetings.append(meeting)
        # Sent and received by two launches, a combine gives its lease back only when it is waited for.
        inside = emulate(
            PER_NODE, SLOTS, capacity=NODES * MOST, row_bytes=4 * HIDDEN, top_k=TOP_K, filled=0xFF,
            num_leases=2 * options.num_leases,
        )  # fmt: skip
        for number, transport in enumerate(inside):
            transport._run = meeting  # type: ignore[method-assign]
            between = FixedSizeDedup(None, PER_NODE * SLOTS, HierarchicalOptions(MOST), NodeCapacity(MOST, rows))
            between.num_ranks, between.rank = NODES, node
            between._start = lambda *rows, rail=rails[number], own=node: rail.start(own, *rows)  # type: ignore[assignment, misc]
            both = Hierarchical.__new__(Hierarchical)
            rail_ranks, node_ranks = tuple(range(number, RANKS, PER_NODE)), tuple(range(RANKS))[node * PER_NODE :][:2]
            MultiHop.__init__(both, None, SLOTS, (Hop(between, rail_ranks), Hop(transport, node_ranks)))
            both.num_ranks, both.rank, both.between, both.inside = RANKS, node * PER_NODE + number, between, transport
            made.append(both)
    return made, meetings


@pytest.mark.parametrize(("chunks", "resend"), [(1, False), (3, False), (2, True)])
def test_output_and_gradients_are_those_of_one_rank(chunks: int, resend: bool) -> None:
    problem = RideProblem(TOKENS, TOP_K, SLOTS, HIDDEN, INNER)
    problem.slot[::3] = -1
    # So fewer rows cross than there are tokens, in each piece.
    rows = 8 if chunks == 2 else 6

    def call(
        transport: Any, x: torch.Tensor, routing: Routing, weights: ExpertWeights, stats: LayerStats, rank: int | None
    ) -> torch.Tensor:
        order = PLAIN if chunks == 1 else ChunkedOrder(chunks, chunks)
        policies = ActivationPolicies("resend" if resend else "save", "save")
        setup = RideSetup(transport, GroupedExperts(FUNCTION), stats, order, NO_HOOKS, policies)
        return ride(x, routing, routing.expert_TK, weights, setup)[0]

    want = problem.on_one_rank(call)
    transports, meetings = two_hops(chunks, resend, rows)
    for together, alone in zip(problem.on_ranks(call, transports, *meetings), want, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    if chunks > 1:
        return
    # Counted on the host between nodes and by kernels inside, bytes are those that the settled options predict.
    settled, layout = (
        HierarchicalOptions(MOST, first_hop="fixed", inside="nvlink", capacity=rows),
        ExpertLayout.contiguous(EXPERTS, RANKS),
    )
    shape: dict[str, Any] = {"hidden": HIDDEN, "element_size": 4}
    routings = [problem.slot[problem.rows_of(rank)] for rank in range(RANKS)]
    topology, stats = Topology.even(RANKS, NODES), problem.stats
    volume = predict("hierarchical", routings, layout, **shape, options=settled, topology=topology)
    baseline = predict("alltoall", routings, layout, **shape)
    for verb in VERBS:
        assert [one.traffic.bytes[verb] for one in stats] == volume.bytes_WW[verb].tolist(), verb
        if verb != "plan":
            assert sum(one.traffic.baseline[verb] for one in stats) == baseline.bytes_remote(verb), verb
    assert volume.bytes_remote("plan") == 0
