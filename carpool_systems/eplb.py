"""DeepSeek's Expert Parallelism Load Balancer (EPLB, published with DeepSeek-V3): replicate what is hot, pack evenly.

    1. groups to nodes    groups of experts (routing limits a token to a few groups) by falling load, each to the
                          node with the least, equally many groups per node;
    2. replicate          inside each node, each extra slot goes to the expert with the largest load per copy;
    3. pack               copies by falling load per copy, each to the rank of the node with the least load and a
                          free slot.

    loads 8, 2, 1, 1 on 2 ranks with 1 extra slot each: expert 0 twice (4 each), then again no rank is without it,
    so the next extra slot goes to expert 1 (1 each): slots [0, 1, 2], [0, 1, 3], loads 6 and 6.

A copy assumes an equal share of its expert's load; who serves a token is decided by `carpool.layout.assign`, which
prefers copies that cost no ride. Two differences from the original: a rank holds an expert once at most, since a
second copy there would serve nothing; and each expert has a home among its slots, equally many per rank where possible.
Without extra slots, it is LPT by node and rank.
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.solvers.plain import pack
from carpool.placement.solvers.problem import Problem
from carpool.placement.trace import Array


def eplb(problem: Problem) -> ExpertLayout:
    """Loads packed into equal slots, hot experts in several."""
    return from_loads(
        problem.expected_E, problem.capacity_W, problem.topology, problem.extra_slots, problem.expert_groups
    )


def from_loads(
    load_E: Array, capacity_W: Array, topology: Topology, extra_slots: int = 0, expert_groups: int | None = None
) -> ExpertLayout:
    """The same from loads alone, which may be a prediction.

    Args:
        load_E: (E,) expected choices of each expert.
        capacity_W: (W,) experts that each rank owns; their sum is at least E.
        topology, extra_slots, expert_groups: see `Problem`.

    Raises:
        ValueError: with `expert_groups`, nodes that own unequal numbers of experts."""
    num_experts, num_nodes, node_W = len(load_E), topology.num_nodes, np.array(topology.node_of)
    room_N = np.bincount(node_W, weights=capacity_W).astype(np.int64)
    groups = expert_groups or num_experts
    load_G = np.asarray(load_E, dtype=np.float64).reshape(groups, -1).sum(1)
    size = num_experts // groups
    if size > 1 and (room_N != num_experts // num_nodes).any():
        raise ValueError("EPLB with expert_groups needs equally many experts per node")
    node_E = np.repeat(pack(load_G, room_N // size), size)
    slots: list[list[int]] = [[]] * len(capacity_W)
    for node in range(num_nodes):
        experts, ranks = np.flatnonzero(node_E == node), np.flatnonzero(node_W == node)
        for rank, filled in zip(ranks, _fill_node(load_E, experts, capacity_W[ranks] + extra_slots), strict=True):
            slots[rank] = filled
    return ExpertLayout(_choose_homes(slots, capacity_W), tuple(map(tuple, slots)))


def _fill_node(load_E: Array, experts: Array, slots_W: Array) -> list[list[int]]:
    """Steps 2 and 3 for the experts of a node: the experts of each of its ranks."""
    load = np.asarray(load_E, dtype=np.float64)[experts]
    copies = np.ones(len(experts), dtype=np.int64)
    for _ in range(int(slots_W.sum()) - len(experts)):
        share = np.where(copies < len(slots_W), load / copies, -1.0)
        if share.max() < 0:
            break  # every expert is everywhere
        copies[share.argmax()] += 1
    share = load / copies
    filled: list[list[int]] = [[] for _ in slots_W]
    sum_W = np.zeros(len(slots_W))
    for one in np.argsort(-share, kind="stable"):
        for _ in range(copies[one]):
            free = [len(f) < room and one not in f for f, room in zip(filled, slots_W, strict=True)]
            if not any(free):
                break  # only ranks that hold it have slots left
            rank = int(np.where(free, sum_W, np.inf).argmin())
            filled[rank].append(int(one))
            sum_W[rank] += share[one]
    return [[int(experts[one]) for one in rank] for rank in filled]


def _choose_homes(slots: list[list[int]], capacity_W: Array) -> tuple[tuple[int, ...], ...]:
    """A home for each expert among the ranks that hold it, `capacity_W` per rank: a matching by augmenting paths. An
    expert that fits nowhere gets a home on a rank with room, which does not compute it."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(slots):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    homes: list[set[int]] = [set() for _ in slots]

    def place(expert: int, tried: set[int]) -> bool:
        for rank in holders[expert]:
            if rank in tried:
                continue
            tried.add(rank)
            if len(homes[rank]) < capacity_W[rank]:
                homes[rank].add(expert)
                return True
            for other in sorted(homes[rank]):
                homes[rank].discard(other)
                if place(other, tried):
                    homes[rank].add(expert)
                    return True
                homes[rank].add(other)
        return False

    homeless = [e for e in sorted(holders, key=lambda e: (len(holders[e]), e)) if not place(e, set())]
    for expert in homeless:
        next(home for home, room in zip(homes, capacity_W, strict=True) if len(home) < room).add(expert)
    return tuple(tuple(e for e in experts if e in home) + tuple(sorted(home - set(experts)))
                 for experts, home in zip(slots, homes, strict=True))  # fmt: skip
