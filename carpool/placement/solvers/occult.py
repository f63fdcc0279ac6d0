"""Placement by collaboration, greedily pair by pair, as in Occult ("Optimizing Collaborative Communication across
Experts for Accelerated Parallel MoE Training and Inference", ICML 2025).

Two experts *collaborate* on a token that chose both; if they live together, the token needs one ride for the two.
Occult counts collaborations in a matrix (E, E) and fills rank after rank with experts that collaborate most:

    1. start a rank with the pair of unplaced experts that collaborate most,
    2. add the unplaced expert with the largest sum of collaborations with those on the rank,
    3. until the rank is full; then the next rank.

It counts pairs, but a ride is shared by a whole set: an expert that collaborates with two experts of a rank on the same
tokens is counted twice, though it saves those tokens one ride. It ignores load. With several nodes it fills nodes in
this way first, and then the ranks of each node.
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import Problem
from carpool.placement.trace import Array


def occult(problem: Problem) -> ExpertLayout:
    """Ranks filled by collaboration."""
    together_EE = problem.trace.coactivation_EE.copy()
    np.fill_diagonal(together_EE, 0)
    fill_N = np.bincount(problem.node_W, weights=problem.fill_W).astype(np.int64)
    node_E = gather_groups(together_EE, np.arange(problem.num_experts), fill_N)
    rank_E = np.empty(problem.num_experts, dtype=np.int64)
    for node in range(problem.num_nodes):
        experts, ranks = np.flatnonzero(node_E == node), np.flatnonzero(problem.node_W == node)
        rank_E[experts] = ranks[gather_groups(together_EE, experts, problem.fill_W[ranks])]
    return problem.layout(rank_E)


def gather_groups(together_EE: Array, experts: Array, room_G: Array) -> Array:
    """(len(experts),) the group of each expert given, groups of the sizes `room_G` filled one after the other."""
    among = together_EE[np.ix_(experts, experts)].astype(np.float64)
    group = np.full(len(experts), -1)
    for number, room in enumerate(room_G):
        if room == 0:
            continue
        free = group < 0
        pairs = np.where(free[:, None] & free[None, :], among, -1.0)
        first = int(pairs.max(1).argmax())
        group[first] = number
        attraction = among[first].copy()
        for _ in range(int(room) - 1):
            best = int(np.where(group < 0, attraction, -1.0).argmax())
            group[best] = number
            attraction += among[best]
    return group
