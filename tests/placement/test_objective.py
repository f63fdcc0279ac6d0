"""The objective against `volume.predict`, against loops, and against numbers worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.objective import evaluate, served_by
from carpool.placement.predicted_volume import predict
from carpool.placement.trace import LayerTrace
from carpool.planner.machine.cost import CostModel
from carpool.planner.machine.hardware import DEFAULT, LinkRate
from tests.layouts import EXPERTS, LAYOUTS, layout_of
from tests.placement.synthetic import layer

# The example of placement/predicted_volume.py: rank 0 holds tokens {0, 1}, {1, 2}, {1, 2}, rank 1 holds token {0, 3}.
EXAMPLE = LayerTrace(np.array([[0, 1], [1, 2], [1, 2], [0, 3]]), np.array([0, 0, 0, 1]), 4)


def test_the_example_of_volume() -> None:
    plain = evaluate(EXAMPLE, ExpertLayout.contiguous(4, 2))
    assert plain.rows_WW.tolist() == [[3, 2], [1, 1]] and plain.ranks_per_token == 7 / 4 and plain.rows_remote == 3
    assert plain.load_W.tolist() == [5, 3] and plain.load_ratio == 1.25 and plain.intra_share == 1 / 4
    better = evaluate(EXAMPLE, ExpertLayout(((1, 2), (0, 3))))
    assert better.rows_WW.sum() == 5 and better.intra_share == 3 / 4


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name in LAYOUTS for ranks in (4, 2)])
def test_rows_are_those_of_volume(name: str, ranks: int) -> None:
    trace, layout = layer(EXPERTS, 3, 1999, seed=3, length=37), layout_of(name, ranks)
    source_T = trace.source_T(ranks)
    routings = [trace.expert_TK[source_T == rank] for rank in range(ranks)]
    volume = predict("dedup", routings, layout, hidden=8, element_size=2)
    found = evaluate(trace, layout)
    np.testing.assert_array_equal(found.rows_WW, volume.rows_WW)
    assert found.ranks_per_token == volume.ranks_per_token and found.rows_remote == volume.rows_remote
    alltoall = predict("alltoall", routings, layout, hidden=8, element_size=2)
    np.testing.assert_array_equal(found.load_W, alltoall.rows_WW.sum(0))


def test_rows_of_nodes_and_pairs_are_those_of_a_loop() -> None:
    trace, layout = layer(24, 4, 599, seed=1, length=37), ExpertLayout.contiguous(24, 6)
    two_levels = CostModel(transport="hierarchical")
    found = evaluate(trace, layout, topology=Topology.even(6, 3), cost=two_levels)
    rank_TK, source_T = served_by(trace, layout), trace.source_T(6)
    rows_NN, together = np.zeros((3, 3), int), 0
    for ranks, source in zip(rank_TK.tolist(), source_T.tolist(), strict=True):
        for node in {rank // 2 for rank in ranks}:
            rows_NN[source // 2, node] += 1
        together += sum(a == b for i, a in enumerate(ranks) for b in ranks[:i])
    assert found.rows_NN.tolist() == rows_NN.tolist() and found.rows_nodes == rows_NN.sum() - rows_NN.trace()
    assert found.intra_share == pytest.approx(together / (599 * 6))
    assert found.rows_NN.sum() < found.rows_WW.sum()


def test_seconds_of_an_example() -> None:
    """The example's tokens as a step of 2 per rank: nothing is scaled."""
    hardware = replace(DEFAULT, nvlink=LinkRate(400.0, 1.0), network=LinkRate(100.0, 5.0), flops=18_000.0)
    cost = CostModel(hidden=100, expert_hidden=10, element_size=4, tokens_per_rank=2, hardware=hardware)
    found = evaluate(EXAMPLE, ExpertLayout.contiguous(4, 2), cost=cost)
    assert found.ride_seconds == pytest.approx(4 * (1.0 + 2 * 400 / 400))  # rank 0 sends 2 rows of 400 bytes
    assert found.compute_seconds == pytest.approx(5 * 3 * 6 * 1000 / 18_000)
    assert found.seconds == found.ride_seconds + found.compute_seconds
    # Two nodes of one rank: the same rows over the slower link.
    apart = evaluate(EXAMPLE, ExpertLayout.contiguous(4, 2), topology=Topology.even(2, 2), cost=cost)
    assert apart.ride_seconds == pytest.approx(4 * 13) and apart.rows_nodes == 3


def test_one_copy_per_node_is_fewer_than_one_per_rank() -> None:
    trace, layout = layer(64, 8, 4000), ExpertLayout.contiguous(64, 8)
    slow, nodes = CostModel(hardware=replace(DEFAULT, network=LinkRate(1e9, 0.0))), Topology.even(8, 2)
    per_rank = evaluate(trace, layout, topology=nodes, cost=slow)
    per_node = evaluate(trace, layout, topology=nodes, cost=replace(slow, transport="hierarchical"))
    assert per_node.ride_seconds < 0.5 * per_rank.ride_seconds and per_node.rows_nodes < per_rank.rows_nodes


@pytest.mark.parametrize("transport", ["dedup", "alltoall", "gather", "nvlink", "hierarchical"])
def test_rows_between_nodes_are_those_that_the_transport_sends(transport: str) -> None:
    trace, layout = layer(16, 4, 800, seed=2, length=40), ExpertLayout.contiguous(16, 4)
    source_T = trace.source_T(4)
    routings = [trace.expert_TK[source_T == rank] for rank in range(4)]
    nodes = Topology.even(4, 2)
    sent_WW = predict(transport, routings, layout, hidden=8, element_size=2, topology=nodes).rows_WW
    found = evaluate(trace, layout, topology=nodes, cost=CostModel(transport=transport))
    np.testing.assert_array_equal(found.sent_WW, sent_WW)
    assert found.rows_nodes == sent_WW[:2, 2:].sum() + sent_WW[2:, :2].sum()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="layout has 6 experts, but the trace of layer has 4"):
        evaluate(EXAMPLE, ExpertLayout.contiguous(6, 2))
    with pytest.raises(ValueError, match="the layout has 2 ranks, but the topology 3"):
        evaluate(EXAMPLE, ExpertLayout.contiguous(4, 2), topology=Topology.even(3))


def test_a_large_trace_takes_little_time() -> None:
    trace = layer(256, 8, 20_000)
    start = time.process_time()
    evaluate(trace, ExpertLayout.contiguous(256, 8))
    assert time.process_time() - start < 1.0
