"""What moving and shadowing cost by the model, and which layouts follow from it: on one process, in milliseconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.adopt import aligned
from carpool.placement.objective import evaluate
from carpool.placement.predicted_volume import predict
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import DEFAULT as H200
from carpool.train.moving.runtime import load_ratio, newest, padded
from carpool.train.moving.solve import Facts, foretell, outlook
from carpool.transport import Codecs, TransportOptions, find_transport
from carpool.transport.codecs import PLAIN
from tests.placement.synthetic import topics

COST = CostModel(transport="dedup", tokens_per_rank=8192, hidden=64, expert_hidden=1024, element_size=2, hardware=H200)
FACTS = Facts(COST, Topology.even(4), top_k=4, micro_batches=2)


def _moves(before: ExpertLayout, after: ExpertLayout) -> int:
    return sum(a[0] != b[0] for a, b in zip(before.home_of, after.home_of, strict=True))


def test_ranks_of_a_node_stay_together_wherever_they_are() -> None:
    """Ranks 0, 2, 4 are one node, 1 and 5 another, 3 a third: only ranks of one node may change places."""
    topology, current = Topology((0, 1, 0, 2, 0, 1), (0, 1, 0, 2, 0, 1)), ExpertLayout.contiguous(12, 6)
    found = ExpertLayout([current.homes[rank] for rank in (2, 5, 4, 3, 0, 1)])
    assert aligned(found, current, topology) == current
    over_nodes = ExpertLayout([current.homes[rank] for rank in (0, 3, 2, 1, 4, 5)])
    assert aligned(over_nodes, current, topology) == over_nodes


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 1), (8, 2), (8, 4)])
def test_ranks_are_named_so_that_few_experts_move(num_ranks: int, num_nodes: int) -> None:
    current = ExpertLayout.permuted([int(e) for e in np.random.default_rng(0).permutation(64)], num_ranks)
    # The same parts, nodes and ranks renamed, rows shuffled, and two experts swapped.
    draw, per_node = np.random.default_rng(1), num_ranks // num_nodes
    order = [n * per_node + r for n in draw.permutation(num_nodes) for r in draw.permutation(per_node)]
    homes = [list(draw.permutation(current.homes[rank])) for rank in order]
    homes[0][0], homes[1][0] = homes[1][0], homes[0][0]
    replicas = [(int(homes[0][3]), 1), (int(homes[2][1]), 0)]
    found = ExpertLayout(homes).with_replicas(replicas)
    new = aligned(found, current, Topology.even(num_ranks, num_nodes))
    assert _moves(current, new) == 2 <= _moves(current, found)
    parts = {frozenset(slots) for slots in found.slots}
    assert {frozenset(slots) for slots in new.slots} == parts and new.num_replicas == 2
    assert all(slots[: len(home)] == home for home, slots in zip(new.homes, new.slots, strict=True))
    stay = sum(a == b for a, b in zip(current.home_of, new.home_of, strict=True))
    assert stay == 62, "experts that stay on their rank keep their rows"
    # Which ranks share a node is part of what was found.
    together = {frozenset(e for rank in new.homes[n * per_node :][:per_node] for e in rank) for n in range(num_nodes)}
    assert together == {
        frozenset(int(e) for rank in found.homes[n * per_node :][:per_node] for e in rank) for n in range(num_nodes)
    }


def test_what_is_foretold_is_what_transports_would_count() -> None:
    trace, layout = topics(experts=16, top_k=4, tokens=600, length=30).layer(0), ExpertLayout.contiguous(16, 4)
    layout = layout.with_replicas([(3, 2), (9, 0)])
    source_T, topology = trace.source_T(4), Topology.even(4, 2)
    routings = [trace.expert_TK[source_T == rank] for rank in range(4)]
    halved = Codecs(dispatch="fp8", inter_node="nodes")
    for transport, codecs in (("dedup", PLAIN), ("alltoall", PLAIN), ("gather", PLAIN), ("hierarchical", halved)):
        one = replace(FACTS, cost=replace(COST, transport=transport, codecs=codecs))
        told = outlook([evaluate(trace, layout, topology=topology, cost=one.cost)] * 2, one)
        options = find_transport(transport).own_options(TransportOptions(codecs=codecs))
        volume = predict(transport, routings, layout, hidden=64, element_size=2, topology=topology, options=options)
        rides = volume.bytes_remote("dispatch", "combine", "dispatch_backward", "combine_backward")
        assert told["rows"] == pytest.approx(volume.rows_remote / 600)
        assert told["bytes"] == pytest.approx(2 * rides / 600), transport


def test_load_is_foretold_for_what_tokens_will_choose() -> None:
    trace = topics(experts=16, top_k=4, tokens=600, length=30).layer(0)
    layout = ExpertLayout.contiguous(16, 4).with_replicas([(3, 2), (9, 0)])
    same, found = foretell(trace, layout, 10.0 * trace.load_E, FACTS), evaluate(trace, layout, cost=COST)
    assert same.load_W == pytest.approx(found.load_W) and same.compute_seconds == pytest.approx(found.compute_seconds)
    load_E = trace.load_E.astype(float)
    load_E[5] *= 4  # on rank 1, alone
    then = foretell(trace, layout, load_E, FACTS)
    share_W = found.load_W + 3 * trace.load_E[5] * (np.arange(4) == 1)
    assert then.load_W / then.load_W.sum() == pytest.approx(share_W / share_W.sum())
    assert then.rows_remote == found.rows_remote


def test_there_is_room_for_replicas_that_come_and_go() -> None:
    layout = ExpertLayout.contiguous(8, 4)
    copies = padded(layout.with_replicas([(0, 1), (5, 1)]), 3)
    assert copies.slots == ((0, 1, -1, -1, -1), (2, 3, 0, 5, -1), (4, 5, -1, -1, -1), (6, 7, -1, -1, -1))
    assert padded(copies, 3) == copies and padded(layout, 3) == layout
    load_E = np.array([8.0, 1, 1, 1, 1, 4, 1, 1])
    assert load_ratio(load_E, layout) == pytest.approx(9 / 4.5)
    assert load_ratio(load_E, copies) == pytest.approx((1 + 1 + 4 + 2) / 4.5)


def test_the_newest_tokens_are_kept_in_whole_sequences() -> None:
    trace = topics(experts=16, top_k=2, tokens=100, length=30)
    kept = newest(trace, 35)
    assert kept.num_tokens == 40 and np.array_equal(kept.expert_LTK, trace.expert_LTK[:, 60:])
    assert newest(trace, 40).num_tokens == 40 and newest(trace, 41).num_tokens == 70 and newest(trace, 999) is trace
