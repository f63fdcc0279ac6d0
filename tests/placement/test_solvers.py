"""Solvers against brute force, against their limits, and against each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.objective import evaluate, served_by
from carpool.placement.solvers import SOLVERS, Problem, solve, solver_names
from carpool.placement.solvers.search import OVERLOAD, aimed_load, swap_search
from carpool.placement.trace import LayerTrace
from carpool.planner.machine.cost import CostModel
from tests.placement.synthetic import layer, topics

try:
    import mtkahypar  # noqa: F401

    HAVE_KAHYPAR = True
except ImportError:
    HAVE_KAHYPAR = False
NAMES = [name for name in SOLVERS if name != "hypergraph" or HAVE_KAHYPAR]
SMALL = layer(24, 4, 1500, seed=2)


def all_layouts(sizes: tuple[int, ...], experts: tuple[int, ...] | None = None) -> Iterator[list[tuple[int, ...]]]:
    """Every way of dealing experts to ranks with these sizes."""
    experts = tuple(range(sum(sizes))) if experts is None else experts
    if not sizes:
        yield []
        return
    for first in itertools.combinations(experts, sizes[0]):
        for others in all_layouts(sizes[1:], tuple(e for e in experts if e not in first)):
            yield [first, *others]


def _distinct(number_TK: np.ndarray) -> int:
    ordered_TK = np.sort(number_TK, axis=1)
    return len(number_TK) + int((ordered_TK[:, 1:] != ordered_TK[:, :-1]).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (4, 2), (6, 3), (5, 1), (1, 1)])
def test_layouts_keep_sizes_and_repeat(name: str, ranks: int, nodes: int) -> None:
    first, second = (solve(name, SMALL, Topology.even(ranks, nodes), seed=3) for _ in range(2))
    assert first == second, "deterministic by seed"
    sizes = [len(home) for home in ExpertLayout.contiguous(24, ranks).homes]
    assert [len(home) for home in first.homes] == sizes
    assert first.num_experts == 24 and first.num_ranks == ranks


@pytest.mark.parametrize("name", NAMES)
def test_sizes_may_be_uneven(name: str) -> None:
    layout = solve(name, SMALL, Topology.even(4), experts_per_rank=[3, 9, 0, 12])
    assert [len(home) for home in layout.homes] == [3, 9, 0, 12]
    roomy = solve(name, SMALL, Topology.even(4), experts_per_rank=[20, 8, 8, 12])
    assert all(len(home) <= room for home, room in zip(roomy.homes, [20, 8, 8, 12], strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("sizes", "nodes"), [((4, 4), 1), ((3, 3, 3), 1), ((2, 2, 2, 2), 2), ((5, 1, 3), 1)])
def test_search_finds_the_optimum_of_tiny_problems(seed: int, sizes: tuple[int, ...], nodes: int) -> None:
    trace = layer(sum(sizes), 3, 300, seed=seed)
    two_levels = CostModel(transport="hierarchical" if nodes > 1 else "dedup")
    problem = Problem(
        trace, Topology.even(len(sizes), nodes), experts_per_rank=sizes, load_limit=1.3, seed=seed, cost=two_levels
    )

    def cost(homes: list[tuple[int, ...]]) -> float:
        rank_E = np.empty(trace.num_experts, dtype=int)
        for rank, home in enumerate(homes):
            rank_E[list(home)] = rank
        rank_TK = rank_E[trace.expert_TK]
        load_W = np.bincount(rank_TK.ravel(), minlength=len(sizes))
        over = np.maximum(load_W - aimed_load(problem), 0).sum()
        nodes_TK = problem.node_W[rank_TK]
        rows = _distinct(rank_TK) + problem.node_weight * _distinct(nodes_TK)
        return float(rows + OVERLOAD * (1 + problem.node_weight) * over)

    best = min(map(cost, all_layouts(sizes)))
    rank_E = swap_search(problem, np.repeat(np.arange(len(sizes)), sizes))
    homes = [tuple(np.flatnonzero(rank_E == rank).tolist()) for rank in range(len(sizes))]
    assert cost(homes) == pytest.approx(best)


@pytest.mark.skipif(not HAVE_KAHYPAR, reason="needs mtkahypar")
def test_hypergraph_finds_the_optimum_of_tiny_problems() -> None:
    for seed in range(3):
        trace = layer(8, 3, 300, seed=seed)
        best = min(evaluate(trace, ExpertLayout(tuple(h))).rows_WW.sum() for h in all_layouts((4, 4)))
        assert evaluate(trace, solve("hypergraph", trace, Topology.even(2))).rows_WW.sum() == best


def test_search_is_below_occult_and_within_the_load_limit_on_text_it_never_saw() -> None:
    trace = topics(64, 8, 20_000, zipf=0.4, length=8, balanced=True)
    solved, held_out = (half.layer(0) for half in trace.split())
    occult, found = (evaluate(held_out, solve(name, solved, Topology.even(8))) for name in ("occult", "search"))
    plain = evaluate(held_out, solve("contiguous", solved, Topology.even(8)))
    assert found.ranks_per_token < occult.ranks_per_token < plain.ranks_per_token
    assert found.load_ratio <= 1.1 < occult.load_ratio
    assert found.intra_share > plain.intra_share


def test_without_a_load_limit_search_beats_what_it_starts_from() -> None:
    solved, held_out = (half.layer(0) for half in topics(64, 8, 8_000).split())
    for start in [name for name in NAMES if name not in ("search", "eplb")]:
        before, after = (solve(name, solved, Topology.even(8), load_limit=1e9) for name in (start, f"{start}+search"))
        assert evaluate(solved, after).rows_WW.sum() < evaluate(solved, before).rows_WW.sum()
        assert evaluate(held_out, after).rows_WW.sum() < evaluate(held_out, before).rows_WW.sum()


def test_nodes_are_served_before_ranks() -> None:
    """If nodes get one copy of a row each, the search saves rows between them, even at the price of rows inside."""
    solved, held_out = (half.layer(0) for half in topics(64, 4, 10_000, length=8).split())
    cost, topology = CostModel(transport="hierarchical"), Topology.even(8, 2)
    flat, nodes = (
        evaluate(held_out, solve("search", solved, Topology.even(8, n), cost=cost), topology=topology, cost=cost)
        for n in (1, 2)
    )
    assert nodes.rows_nodes < flat.rows_nodes


def test_the_search_saves_the_rows_that_the_transport_sends() -> None:
    """Rows that travel once per rank: who takes them for one per node sends more of them, inside nodes and between."""
    solved, topology = topics(64, 4, 5_000, length=8).split()[0].layer(0), Topology.even(8, 2)
    found, mistaken = (
        evaluate(
            solved,
            solve(
                "search", solved, Topology.even(8, 2), cost=CostModel(transport="hierarchical" if wrong else "dedup")
            ),
            topology=topology,
        )
        for wrong in (False, True)
    )
    assert found.rows_remote < mistaken.rows_remote and found.ride_seconds < mistaken.ride_seconds


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("occult", "eplb", "hypergraph")])
def test_nodes_are_those_of_the_topology(name: str) -> None:
    """Ranks dealt out to nodes in turn get what the ranks of the same nodes get where they are consecutive."""
    dealt, order = Topology((0, 1, 0, 1), (0, 1, 0, 1)), (0, 2, 1, 3)
    even, found = (solve(name, SMALL, one) for one in (Topology.even(4, 2), dealt))
    assert found.homes == tuple(even.homes[rank] for rank in order)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_may_have_unequally_many_ranks(name: str) -> None:
    """Three ranks of one node and one of another: the rows between them are those of a loop."""
    uneven = Topology((0, 0, 1, 0), (0, 0, 1, 0))
    layout = solve(name, SMALL, uneven, cost=CostModel(transport="hierarchical" if name == "search" else "dedup"))
    assert [len(rank) for rank in layout.homes] == [6] * 4
    rank_TK, source_T, node_of = served_by(SMALL, layout), SMALL.source_T(4), uneven.node_of
    pairs = zip(rank_TK.tolist(), source_T.tolist(), strict=True)
    rows = sum(node_of[rank] != node_of[source] for ranks, source in pairs for rank in set(ranks))
    assert evaluate(SMALL, layout, topology=uneven).rows_nodes == rows


def test_lpt_and_eplb_balance() -> None:
    trace = layer(64, 8, 3000, zipf=1.0)
    loads = {name: evaluate(trace, solve(name, trace, Topology.even(8))).load_ratio for name in NAMES}
    assert loads["lpt"] == loads["eplb"] < loads["contiguous"]


def test_eplb_keeps_groups_together() -> None:
    grouped = solve("eplb", layer(24, 4, 1500, seed=5), Topology.even(4, 2), expert_groups=6)
    node_of = {e: rank // 2 for rank, home in enumerate(grouped.homes) for e in home}
    assert all(len({node_of[4 * g + i] for i in range(4)}) == 1 for g in range(6))
    with pytest.raises(ValueError, match="expert_groups=5 must divide"):
        solve("eplb", SMALL, Topology.even(4), expert_groups=5)


def test_occult_puts_the_closest_pair_together() -> None:
    expert_TK = np.array([[0, 3]] * 9 + [[1, 2]] * 5 + [[0, 1]] * 2 + [[2, 3]])
    trace = LayerTrace(expert_TK, np.arange(len(expert_TK)), 4)
    assert solve("occult", trace, Topology.even(2)).homes == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve("ocult", SMALL, Topology.even(4)), "no solver 'ocult'; did you mean 'occult'"),
        (lambda: solve("search", SMALL, Topology.even(25)), "24 experts cannot be spread over 25 ranks"),
        (lambda: solve("search", SMALL, Topology.even(4, 3)), "4 ranks cannot be divided evenly among 3 nodes"),
        (lambda: solve("lpt", SMALL, Topology.even(2), experts_per_rank=[3, 4]), "a sum of at least the 24"),
        (lambda: solve("lpt", SMALL, Topology.even(2), load_limit=0.9), "load_limit"),
        (lambda: solve("lpt", SMALL, Topology.even(2), start=ExpertLayout.contiguous(24, 2)), "takes no start"),
        (
            lambda: solve("search", SMALL, Topology.even(4), start=ExpertLayout.contiguous(24, 2)),
            "24 experts on 2 ranks",
        ),
        (
            lambda: solve("search", SMALL, Topology.even(2), start=ExpertLayout((tuple(range(20)), (20, 21, 22, 23)))),
            "more experts",
        ),
    ],
)
def test_what_cannot_be_solved_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_search_starts_where_it_is_told() -> None:
    start = solve("random", SMALL, Topology.even(4), seed=9)
    found = solve("search", SMALL, Topology.even(4), start=start, load_limit=1e9)
    assert evaluate(SMALL, found).rows_WW.sum() < evaluate(SMALL, start).rows_WW.sum()
    assert "search" in SOLVERS and "hypergraph+search" in solver_names()


@pytest.mark.slow
def test_a_large_trace_is_solved_in_little_time() -> None:
    trace = layer(256, 8, 20_000)
    start = time.process_time()
    solve("search", trace, Topology.even(8))
    assert time.process_time() - start < 6.0, "about 2 s on a free core"
