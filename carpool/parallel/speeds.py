"""Ranks of unequal speed: work in proportion to speed, so that all ranks finish at the same time.

A step ends with its slowest rank. If some devices are slower (another generation, throttled, shared), all wait for them
when work is equal. HeterMoE (arXiv 2504.03871) and HEXA-MoE (arXiv 2411.01288) give them less:

    4 sequences on each of 4 ranks, speeds 1, 1, 0.5, 0.5    5, 5, 3 and 3 sequences
    experts with 60 choices on 2 ranks, speeds 1 and 0.5     a layout is as slow as max(load / speed): 40 and 20

The loss and its gradient are sums over all tokens, divided by all tokens (`carpool.train.steps.training_objective`), so
that the distribution of tokens changes only rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from carpool.parallel.degrees import Degrees


def shares(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """`total` in whole parts that are in proportion to speeds (largest remainders, the first of equal ones first), and
    at least 1 each.

    Raises:
        ValueError: there is not one for each."""
    if total < len(speeds):
        raise ValueError(f"{total} cannot be divided over {len(speeds)} ranks with at least one each")
    rest = total - len(speeds)
    # Each has one; what each is to have beyond it.
    exact = [max(0.0, total * speed / sum(speeds) - 1) for speed in speeds]
    exact = [rest * one / (sum(exact) or 1.0) for one in exact]
    found = [math.floor(one + 1e-9) for one in exact]
    order = sorted(range(len(found)), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in order[: rest - sum(found)]:
        found[rank] += 1
    return tuple(1 + one for one in found)


def data_speeds(speeds: Sequence[float], degrees: Degrees) -> tuple[float, ...]:
    """The speed of each data-parallel rank: that of the slowest rank that shares its sequences."""
    found = [math.inf] * degrees.dp
    for rank, speed in enumerate(speeds):
        place = degrees.dp_rank(rank)
        found[place] = min(found[place], speed)
    return tuple(found)
