"""The two layouts that know nothing of the routing: experts in order, the usual default, and in random order."""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import Problem


def contiguous(problem: Problem) -> ExpertLayout:
    """Experts in order: the first ones on rank 0, the next ones on rank 1, and so on."""
    return problem.layout(np.repeat(np.arange(problem.num_ranks), problem.fill_W))


def random(problem: Problem) -> ExpertLayout:
    """Experts in an order drawn by the seed. It shows what a layout is worth that knows nothing."""
    rank_E = np.repeat(np.arange(problem.num_ranks), problem.fill_W)
    return problem.layout(np.random.default_rng(problem.seed).permutation(rank_E))
