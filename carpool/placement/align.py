"""A solver's layout, with its ranks named after those where experts are already, so that little has to move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.trace import Array


def aligned(found: ExpertLayout, current: ExpertLayout, num_nodes: int) -> ExpertLayout:
    """The layout `found` with its ranks renamed and its rows reordered, so that few homes move.

    Each rank of `found` becomes the rank that holds most of its experts already, nodes first. Experts that stay on
    their rank keep their rows, and slots begin with the homes.

    Args:
        num_nodes: of equally many consecutive ranks. Which ranks share a node is kept.

    Example: found homes [[2, 3], [0, 1]], current [[0, 1], [3, 2]]  ->  [[0, 1], [3, 2]]
    """
    per_node = found.num_ranks // num_nodes
    common_WW = np.array([[len(set(a) & set(b)) for b in current.homes] for a in found.homes])
    common_NN = common_WW.reshape(num_nodes, per_node, num_nodes, per_node).sum((1, 3))
    target = [0] * found.num_ranks
    for node, other in enumerate(_pairs(common_NN)):
        inside_RR = common_WW[node * per_node :, other * per_node :][:per_node, :per_node]
        for rank, place in enumerate(_pairs(inside_RR)):
            target[node * per_node + rank] = other * per_node + place
    homes, slots = [()] * found.num_ranks, [()] * found.num_ranks  # type: list[tuple[int, ...]], list[tuple[int, ...]]
    for rank, place in enumerate(target):
        homes[place] = _in_rows(found.homes[rank], current.homes[place])
        computed = set(found.slots[rank])
        kept = tuple(e for e in homes[place] if e in computed)
        slots[place] = kept + tuple(e for e in found.slots[rank] if e not in kept)
    return ExpertLayout(tuple(homes), tuple(slots))


def _in_rows(experts: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """`experts` in an order in which those that `rows` has too are in the same places, as far as there are places."""
    if len(experts) != len(rows):
        return tuple(experts)
    new = iter([e for e in experts if e not in rows])
    return tuple(e if e in experts else next(new) for e in rows)


def _pairs(common_XX: Array) -> list[int]:
    """For each row a column of its own, the largest numbers first."""
    chosen = [-1] * len(common_XX)
    order = np.argsort(-common_XX, axis=None, kind="stable")
    taken: set[int] = set()
    for row, column in zip(*np.unravel_index(order, common_XX.shape), strict=True):
        if chosen[row] == -1 and int(column) not in taken:
            chosen[row] = int(column)
            taken.add(int(column))
    return chosen
