"""Layouts without a search: experts in order, in random order, and by load.

`lpt` is longest processing time first, Graham's rule for balancing machines ("Bounds on Multiprocessing Timing
Anomalies", 1969): experts by decreasing load, each to the rank with the least load so far and free capacity. With ranks
of unequal speed, each goes to the rank that finishes it first. The planners of MindSpeed and SmartMoE use it. The bound
for the largest load, 4/3 of the optimum, is for machines without equal numbers of jobs; with them it is close in
practice, since the many experts with little load fill the gaps.

    loads 9, 7, 6, 5, 4, 1 on 2 ranks of capacity 3; step by step, rank 0 | rank 1:

    9 |        9 | 7        9 | 7 6        9 5 | 7 6        9 5 | 7 6 4        9 5 1 | 7 6 4        sums 15 and 17
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import Problem
from carpool.placement.trace import Array


def contiguous(problem: Problem) -> ExpertLayout:
    """Experts in order: the first ones on rank 0, the next ones on rank 1, and so on."""
    return problem.layout(np.repeat(np.arange(problem.num_ranks), problem.fill_W))


def random(problem: Problem) -> ExpertLayout:
    """Experts in random order, by the seed: a baseline that ignores the routing."""
    rank_E = np.repeat(np.arange(problem.num_ranks), problem.fill_W)
    return problem.layout(np.random.default_rng(problem.seed).permutation(rank_E))


def lpt(problem: Problem) -> ExpertLayout:
    """Equal loads, without regard to co-activation."""
    speed_W = problem.cost.speed_W(problem.num_ranks) if problem.cost.speeds else None
    return problem.layout(pack(problem.expected_E, problem.capacity_W, speed_W))


def pack(load_E: Array, capacity_W: Array, speed_W: Array | None = None) -> Array:
    """(E,) the rank of each expert; rank w gets capacity_W[w] of them. With unequal speeds each expert goes to the rank
    that finishes it first, including its load so far."""
    rank_E = np.empty(len(load_E), dtype=np.int64)
    sum_W, left_W = np.zeros(len(capacity_W)), np.array(capacity_W, dtype=np.int64)
    for expert in np.argsort(-np.asarray(load_E, dtype=np.float64), kind="stable"):
        done_W = sum_W if speed_W is None else (sum_W + load_E[expert]) / speed_W
        rank = int(np.where(left_W > 0, done_W, np.inf).argmin())
        rank_E[expert] = rank
        sum_W[rank] += load_E[expert]
        left_W[rank] -= 1
    return rank_E
