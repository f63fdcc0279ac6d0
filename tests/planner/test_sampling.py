"""Loads and rows that are drawn from traces, against a count token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.predicted_volume import predict
from carpool.placement.trace import Trace
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.planner.simulator.sampling import SampledRouting, Spread
from carpool.planner.step.events import Group

E, K, LENGTH = 12, 3, 5


def _trace(layers: int = 2, sequences: int = 7, seed: int = 0) -> Trace:
    """Sequences that prefer one expert each."""
    rng = np.random.default_rng(seed)
    liked_S = rng.integers(0, E, sequences)
    score_LTE = rng.random((layers, sequences * LENGTH, E))
    score_LTE[:, np.arange(sequences * LENGTH), np.repeat(liked_S, LENGTH)] += 0.5
    expert_LTK = np.argsort(-score_LTE, axis=2)[..., :K]
    names = tuple(f"layers.{i}" for i in range(layers))
    return Trace(expert_LTK, np.repeat(np.arange(sequences), LENGTH), names, {"num_experts": E})


def _spread(**more: Any) -> Spread:
    given = {"ranks": 12, "group": Group(6), "ranks_per_node": 12, "tokens": 4 * LENGTH, **more}
    return Spread(num_experts=E, top_k=K, **given)


def _by_token(sampled: SampledRouting, trace: Trace, recorded: int, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Load and rows of each rank, from the tokens that it has drawn."""
    spread = sampled.spread
    size, stride = spread.group
    tokens_RR = np.zeros((spread.ranks, spread.ranks))  # rows from rank to rank
    load_R = np.zeros(spread.ranks)
    counts_RS = sampled._counts(micro_batch).astype(int)
    for rank in range(spread.ranks):
        first = rank - rank // stride % size * stride
        member = [first + i * stride for i in range(size)]
        for sequence, times in enumerate(counts_RS[rank]):
            for token in range(sequence * LENGTH, (sequence + 1) * LENGTH):
                at_K = [member[expert // (E // size)] for expert in trace.expert_LTK[recorded, token].astype(int)]
                for other in at_K:
                    load_R[other] += times
                places = at_K if spread.one_row_for == "expert" else set(at_K)
                if spread.one_row_for == "node":
                    # One row for each node, a share of it for each rank of the group there.
                    nodes = {other // spread.ranks_per_node for other in at_K}
                    inside = [o for o in member if o // spread.ranks_per_node in nodes]
                    for other in inside:
                        tokens_RR[rank, other] += times * len(nodes) / len(inside)
                else:
                    for other in places:
                        tokens_RR[rank, other] += times
    node_R = np.arange(spread.ranks) // spread.ranks_per_node if spread.places < size else np.arange(spread.ranks)
    remote_RR = np.where(np.not_equal.outer(node_R, node_R), tokens_RR, 0)
    return load_R, np.maximum(remote_RR.sum(0), remote_RR.sum(1))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"group": Group(3, 2)},
        {"group": Group(12), "ranks_per_node": 4},
        {"group": Group(6, 2), "ranks_per_node": 4},
        {"group": Group(6), "ranks_per_node": 3, "one_row_for": "node"},
        {"group": Group(6), "one_row_for": "expert"},
    ],
)
def test_what_is_drawn_is_counted(more: dict[str, Any]) -> None:
    trace, spread = _trace(), _spread(**more)
    sampled = SampledRouting(spread, trace, layers=2)
    for recorded, micro_batch in ((0, 0), (1, 2)):
        load_R, rows_R = _by_token(sampled, trace, recorded, micro_batch)
        found_load_R, found_rows_R = sampled._drawn(recorded, sampled._counts(micro_batch))
        np.testing.assert_allclose(found_load_R, load_R / (4 * LENGTH * K), rtol=1e-5)
        inside = spread.group.size // spread.places
        remote = 4 * LENGTH * spread.visits * (spread.group.size - inside)
        np.testing.assert_allclose(found_rows_R, rows_R / remote, rtol=1e-5)
    # Every group computes what its tokens choose.
    grid = sampled._grid(sampled.load_R(1))
    np.testing.assert_allclose(grid.mean(1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("one_row_for", ["rank", "expert", "node"])
def test_uniform_routing_is_balanced_on_average(one_row_for: Any) -> None:
    spread = Spread(64, Group(8), 64, 8, 4096, 4, one_row_for)
    sampled = SampledRouting(spread, layers=6)
    load = np.mean([sampled.load_R(layer) for layer in range(6)])
    rows = np.mean([sampled.rows_R(layer) for layer in range(6)])
    assert load == pytest.approx(1.0, abs=1e-4) and rows == pytest.approx(1.0, abs=0.02)
    # 8 x 4,096 x 8 choices on 8 ranks: hypergeometric, so a rank deviates by about half a percent.
    deviation = np.mean([sampled.load_R(layer).std() for layer in range(6)])
    assert deviation == pytest.approx(np.sqrt(7 / 8 * 56 / 63 / (8 * 4096)), rel=0.3)
    assert 1.0 < sampled.imbalance() < 1.03


def test_draws_of_layers_and_their_deviations() -> None:
    # 3 of 12 experts on 6 ranks: a token misses a rank with 10/12 x 9/11 x 8/10.
    assert _spread().visits == pytest.approx(1 - 10 / 12 * 9 / 11 * 8 / 10)
    assert _spread(one_row_for="expert").visits == 0.5
    spread = _spread()
    one, two, none = (SampledRouting(spread, _trace(), layers=3, stretch=by) for by in (1.0, 2.0, 0.0))
    np.testing.assert_allclose(two.load_R(1) - 1, 2 * (one.load_R(1) - 1))
    assert none.imbalance() == 1.0 < one.imbalance() < two.imbalance()
    sampled = SampledRouting(_spread(), _trace(), layers=4)
    assert not np.array_equal(sampled.load_R(0), sampled.load_R(1))
    assert sorted(sampled.load_R(0)) == pytest.approx(sorted(sampled.load_R(1)))  # of one recorded layer, turned
    assert not np.array_equal(sampled.load_R(0), sampled.load_R(0, 1))
    again = SampledRouting(_spread(), _trace(), layers=4)
    np.testing.assert_array_equal(again.rows_R(3, 1), sampled.rows_R(3, 1))


def test_a_trace_of_another_model_is_refused() -> None:
    spread = Spread(8, Group(8), 64, 8, 4096, 8)
    with pytest.raises(ValueError, match="the trace has 3 of 12 experts for each token, and the model 8 of 64"):
        SampledRouting(spread, _trace(), layers=2)
    with pytest.raises(ValueError, match="12 experts cannot be divided among 5 ranks"):
        SampledRouting(_spread(ranks=10, group=Group(5)), layers=2)


@pytest.mark.parametrize(
    ("transport", "one_row_for"), [("dedup", "rank"), ("alltoall", "expert"), ("hierarchical", "node")]
)
def test_rows_and_times_are_those_of_transports_and_cost_model(transport: str, one_row_for: Any) -> None:
    """Two nodes of three ranks: what `carpool.placement.predicted_volume` counts of the same tokens, and `CostModel`
    makes of them."""
    trace, topology = _trace(layers=1), Topology.even(6, 2)
    spread = _spread(ranks=6, ranks_per_node=3, one_row_for=one_row_for)
    sampled = SampledRouting(spread, trace, layers=1)
    tokens_ST = np.arange(trace.num_tokens).reshape(-1, LENGTH)
    routings = [trace.expert_LTK[0, np.repeat(tokens_ST, times, 0).ravel()] for times in sampled._counts(0).astype(int)]
    volume = predict(transport, routings, ExpertLayout.contiguous(E, 6), hidden=64, element_size=2, topology=topology)
    between_WW = np.where(topology.pairs["network"], volume.rows_WW, 0)
    expected = 4 * LENGTH * spread.visits * 3
    found_R = sampled.rows_R(0) * expected
    if transport == "hierarchical":
        # Which rank of a node takes a row in is not drawn: its ranks have equally many.
        received_W = between_WW.sum(0).reshape(2, 3).mean(1).repeat(3)
        assert np.maximum(between_WW.sum(1), received_W) == pytest.approx(found_R, rel=1e-5)
        return
    assert np.maximum(between_WW.sum(0), between_WW.sum(1)) == pytest.approx(found_R, rel=1e-5)
    # Where the network is what takes longest, a ride of the cost model is that of the rank with most rows.
    cost = CostModel(hidden=64, transport=transport)
    rate = cost.hardware.network
    slowest = rate.latency + sampled.rows_R(0).max() * expected * cost.row_bytes / rate.bytes_per_second
    assert cost.ride_seconds(volume.rows_WW, topology) / RIDES == pytest.approx(slowest, rel=1e-5)
