"""Ranks of unequal speed: their shares of a batch, and experts by the time that they take."""

from __future__ import annotations

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees, data_speeds, shares
from carpool.placement import solvers
from carpool.placement.objective import evaluate
from carpool.planner.machine.cost import CostModel
from carpool.train.config import load_config
from carpool.train.data.loader import TrainLoader
from carpool.train.data.sequences import Stream
from tests.placement.synthetic import layer


@pytest.mark.parametrize(
    ("total", "speeds", "expected"),
    [
        (16, (1, 1, 0.5, 0.5), (5, 5, 3, 3)),
        (8, (1, 1), (4, 4)),
        (7, (2, 1), (5, 2)),
        (4, (100, 1, 1), (2, 1, 1)),
        (3, (5, 1, 1), (1, 1, 1)),
        (10, (0.3, 0.3, 0.3), (4, 3, 3)),
    ],
)
def test_shares(total: int, speeds: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert shares(total, speeds) == expected


def test_shares_are_the_nearest_whole_parts() -> None:
    for seed in range(50):
        draw = np.random.default_rng(seed)
        speeds = draw.uniform(0.2, 1, 5)
        found = shares(200, tuple(speeds))
        assert sum(found) == 200 and np.abs(np.array(found) - 200 * speeds / speeds.sum()).max() < 2


def test_ranks_that_share_sequences_are_as_fast_as_their_slowest() -> None:
    assert data_speeds((1, 0.5, 1, 1, 0.2, 0.3, 1, 0.9), Degrees(fsdp=4, tp=2)) == (0.5, 1, 0.2, 0.9)
    assert data_speeds((1, 0.5, 1, 1), Degrees(fsdp=2, pp=2)) == (1, 0.5)


def test_a_configuration_says_one_speed_for_each_rank() -> None:
    section = load_config(None, ["parallelism.rank_speeds=[1, 0.5]", "parallelism.num_ranks=2"]).parallelism
    assert section.rank_speeds == (1, 0.5) and section.batch_sizes(3, Degrees(fsdp=2)) == (4, 2)
    with pytest.raises(ValueError, match="rank_speeds has 2 numbers, but there are 4 ranks"):
        section.check_ranks(4)
    with pytest.raises(ValueError, match="speeds are above 0"):
        load_config(None, ["parallelism.rank_speeds=[1, 0]", "parallelism.num_ranks=2"])
    assert load_config(None, ["parallelism.rank_speeds=measured"]).parallelism.batch_sizes(3, Degrees(fsdp=2)) == (3, 3)


def test_a_micro_batch_of_all_ranks_is_the_same_whatever_their_shares() -> None:
    sequences = Stream(np.arange(601), 4)

    def micro_batches(shares: tuple[int, ...] | None) -> list[list[list[tuple[int, ...]]]]:
        loaders = [
            TrainLoader(sequences, batch_size=3, accumulation=2, dp_rank=rank, dp_size=4, shares=shares)
            for rank in range(4)
        ]
        steps = [[next(loader) for loader in loaders] for _ in range(3)]
        assert {loader.state_dict()["position"] for loader in loaders} == {3 * 24}
        return [
            [sorted(tuple(row) for rank in step for row in rank[micro]["input_ids"].tolist()) for micro in range(2)]
            for step in steps
        ]

    even, uneven = micro_batches(None), micro_batches((5, 4, 2, 1))
    assert even == uneven
    loader = TrainLoader(sequences, batch_size=3, accumulation=2, dp_rank=2, dp_size=4, shares=(5, 4, 2, 1))
    assert [batch["input_ids"].shape[0] for batch in next(loader)] == [2, 2]
    assert micro_batches((3, 3, 3, 3)) == even


def test_experts_go_where_they_are_done_first() -> None:
    """Half as fast: half the load, and a shorter time of the rank that is last, with equally many experts each."""
    trace = layer(experts=16, top_k=2, tokens=600, zipf=0.8)
    slow, topology = CostModel(speeds=(1.0, 1.0, 1.0, 0.4)), Topology.even(4)
    plain = CostModel()
    speed_W = np.array([1, 1, 1, 0.4])
    for solver in ("lpt", "search"):
        found = solvers.solve(solver, trace, topology, cost=slow)
        even = solvers.solve(solver, trace, topology, cost=plain)
        assert {len(home) for home in found.homes} == {4}
        ours, theirs = (evaluate(trace, one, topology=topology, cost=slow) for one in (found, even))
        assert ours.compute_seconds < 0.9 * theirs.compute_seconds
        assert ours.load_W[3] < 0.7 * theirs.load_W[3]
        assert (ours.load_W / speed_W).max() < (theirs.load_W / speed_W).max()


def test_time_is_that_of_the_rank_that_is_last() -> None:
    load_W = np.array([60.0, 20.0])
    assert CostModel(speeds=(3.0, 1.0)).compute_seconds(load_W) == pytest.approx(
        CostModel().compute_seconds(np.array([40.0, 40.0]))
    )
    trace = layer(experts=4, top_k=1, tokens=64)
    with pytest.raises(ValueError, match="speeds of 3 ranks, but 2 ranks"):
        evaluate(trace, ExpertLayout.contiguous(4, 2), cost=CostModel(speeds=(1.0, 1.0, 1.0)))
