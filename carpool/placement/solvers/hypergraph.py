"""Hypergraph partitioning with Mt-KaHyPar (Gottesbüren et al., "Scalable High-Quality Hypergraph Partitioning", 2024).

Experts are vertices, tokens are hyperedges, and the number of sends is the metric that partitioners call km1: the sum
over edges of (parts touched - 1). So the exact objective is a standard problem, and this is its
reference solver. It merges vertices that share many edges, partitions the small graph, undoes the merges and improves
each level.

It respects the number of experts per rank, and ignores load, because a vertex has one weight, which counts experts. To
satisfy a load limit, start `search` from it ("hypergraph+search"). With several nodes it first divides experts among
nodes, because inter-node sends cost most, and then each node's experts among its ranks. It uses one thread and a seed
to be deterministic. Needs the package mtkahypar (Linux on x86-64).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import Problem
from carpool.placement.trace import Array


def hypergraph(problem: Problem) -> ExpertLayout:
    """Minimise sends for given numbers of experts; first over nodes, then over ranks."""
    kahypar = _import()
    fill_N = np.bincount(problem.node_W, weights=problem.fill_W).astype(np.int64)
    node_E = partition(kahypar, problem, np.arange(problem.num_experts), fill_N)
    rank_E = np.empty(problem.num_experts, dtype=np.int64)
    for node in range(problem.num_nodes):
        experts, ranks = np.flatnonzero(node_E == node), np.flatnonzero(problem.node_W == node)
        rank_E[experts] = ranks[partition(kahypar, problem, experts, problem.fill_W[ranks])]
    return problem.layout(rank_E)


def partition(kahypar: Any, problem: Problem, experts: Array, capacity_G: Array) -> Array:
    """(len(experts),) the part of each given expert, with `capacity_G` experts in each part."""
    if len(capacity_G) == 1 or len(experts) == 0:
        return np.zeros(len(experts), dtype=np.int64)
    number_E = np.full(problem.num_experts, -1)
    number_E[experts] = np.arange(len(experts))
    pins_TK = np.sort(number_E[problem.trace.expert_TK], axis=1)
    edges_XK, weight_X = np.unique(pins_TK, axis=0, return_counts=True)
    several_X = (edges_XK >= 0).sum(1) > 1  # a token with one expert here cannot be cut
    edges = [[pin for pin in row if pin >= 0] for row in edges_XK[several_X].tolist()]
    if not edges:
        return np.repeat(np.arange(len(capacity_G)), capacity_G)
    library = kahypar.initialize(1, False)
    kahypar.set_seed(problem.seed)
    context = library.context_from_preset(kahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(len(capacity_G), 0.0, kahypar.Objective.KM1)
    if len(set(capacity_G.tolist())) > 1:
        context.set_individual_target_block_weights(np.maximum(capacity_G, 1).tolist())
    ones, weights = [1] * len(experts), weight_X[several_X].tolist()
    graph = library.create_hypergraph(context, len(experts), len(edges), edges, ones, weights)
    part = np.array(graph.partition(context).get_partition())
    return fit(part, capacity_G, problem.trace.coactivation_EE[np.ix_(experts, experts)])


def fit(part: Array, capacity_G: Array, together_EE: Array) -> Array:
    """The partition changed so that part g has capacity_G[g] experts: those with the least co-activation move."""
    part = part.copy()
    while (over_G := np.bincount(part, minlength=len(capacity_G)) - capacity_G).any():
        source, target = int(over_G.argmax()), int(over_G.argmin())
        movable = np.flatnonzero(part == source)
        stays = together_EE[np.ix_(movable, np.flatnonzero(part == source))].sum(1) - np.diag(together_EE)[movable]
        goes = together_EE[np.ix_(movable, np.flatnonzero(part == target))].sum(1)
        part[movable[(stays - goes).argmin()]] = target
    return part


def _import() -> Any:
    try:
        import mtkahypar
    except ImportError as error:
        raise ImportError(
            "the solver 'hypergraph' needs the package mtkahypar: pip install mtkahypar (Linux on x86-64)"
        ) from error
    return mtkahypar
