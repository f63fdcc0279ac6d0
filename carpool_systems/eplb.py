"""DeepSeek's Expert Parallelism Load Balancer (EPLB, published with DeepSeek-V3), as far as it places homes.

    1. groups to nodes    groups of experts (routing limits a token to a few groups) by falling load, each to the
                          node with the least, equally many groups per node;
    2. pack               experts by falling load, each to the rank of the node with the least load that has room.

What it replicates is a plan of spare slots (`moe.spare_plan = "eplb"`, spare_plans.py). Without groups this is LPT by
node and rank.
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.plain import pack
from carpool.placement.solvers.problem import Problem


def eplb(problem: Problem) -> ExpertLayout:
    """Loads packed into equal ranks.

    Raises:
        ValueError: with `expert_groups`, nodes that own unequal numbers of experts."""
    load_E = np.asarray(problem.expected_E, dtype=np.float64)
    capacity_W, topology = problem.capacity_W, problem.topology
    num_experts, num_nodes, node_W = len(load_E), topology.num_nodes, np.array(topology.node_of)
    room_N = np.bincount(node_W, weights=capacity_W).astype(np.int64)
    groups = problem.expert_groups or num_experts
    load_G = load_E.reshape(groups, -1).sum(1)
    size = num_experts // groups
    if size > 1 and (room_N != num_experts // num_nodes).any():
        raise ValueError("EPLB with expert_groups needs equally many experts per node")
    node_E = np.repeat(pack(load_G, room_N // size), size)
    homes: list[tuple[int, ...]] = [()] * len(capacity_W)
    for node in range(num_nodes):
        experts, ranks = np.flatnonzero(node_E == node), np.flatnonzero(node_W == node)
        rank_N = pack(load_E[experts], capacity_W[ranks])
        for number, rank in enumerate(ranks):
            homes[rank] = tuple(experts[rank_N == number].tolist())
    return ExpertLayout(tuple(homes))
