"""The two layouts that need no thought: experts in order, which is everybody's default, and in random order."""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import Problem


def contiguous(problem: Problem) -> ExpertLayout:
    """Expert 0 and its neighbours on rank 0, and so on."""
    return problem.layout(np.repeat(np.arange(problem.num_ranks), problem.fill_W))


def random(problem: Problem) -> ExpertLayout:
    """Experts dealt by the seed: what a layout is worth that knows nothing."""
    rank_E = np.repeat(np.arange(problem.num_ranks), problem.fill_W)
    return problem.layout(np.random.default_rng(problem.seed).permutation(rank_E))
