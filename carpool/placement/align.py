"""A solver's layout, with its ranks named after those where experts are already, so that little has to move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.trace import Array


def aligned(found: ExpertLayout, current: ExpertLayout, topology: Topology) -> ExpertLayout:
    """The layout `found` with its ranks renamed and its rows reordered, so that few homes move.

    Each rank of `found` becomes the rank that holds most of its experts already, nodes first. Experts that stay on
    their rank keep their rows, and slots begin with the homes.

    Args:
        topology: of the ranks. Ranks that share a node still share one.

    Example: found homes [[2, 3], [0, 1]], current [[0, 1], [3, 2]]  ->  [[0, 1], [3, 2]]
    """
    common_WW = np.array([[len(set(a) & set(b)) for b in current.homes] for a in found.homes])
    ranks_of = [np.flatnonzero(np.array(topology.node_of) == node) for node in range(topology.num_nodes)]
    # Nodes with other numbers of ranks cannot take each other's places.
    common_NN = np.array(
        [[common_WW[np.ix_(a, b)].sum() if len(a) == len(b) else -1 for b in ranks_of] for a in ranks_of]
    )
    target = [0] * found.num_ranks
    for node, other in enumerate(_pairs(common_NN)):
        ranks, places = ranks_of[node], ranks_of[other]
        for rank, place in enumerate(_pairs(common_WW[np.ix_(ranks, places)])):
            target[ranks[rank]] = int(places[place])
    homes, slots = [()] * found.num_ranks, [()] * found.num_ranks  # type: list[tuple[int, ...]], list[tuple[int, ...]]
    for rank, place in enumerate(target):
        homes[place] = _in_rows(found.homes[rank], current.homes[place])
        computed = set(found.slots[rank])
        kept = tuple(e for e in homes[place] if e in computed)
        slots[place] = kept + tuple(e for e in found.slots[rank] if e not in kept)
    return ExpertLayout(tuple(homes), tuple(slots), found.slices)


def _in_rows(experts: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """`experts` in an order in which those that `rows` has too are in the same places, as far as there are places."""
    if len(experts) != len(rows):
        return tuple(experts)
    new = iter([e for e in experts if e not in rows])
    return tuple(e if e in experts else next(new) for e in rows)


def _pairs(common_XX: Array) -> list[int]:
    """For each row a column of its own, the largest numbers first; numbers below 0 are no pairs."""
    chosen = [-1] * len(common_XX)
    order = np.argsort(-common_XX, axis=None, kind="stable")
    taken: set[int] = set()
    for row, column in zip(*np.unravel_index(order, common_XX.shape), strict=True):
        if chosen[row] == -1 and int(column) not in taken and common_XX[row, column] >= 0:
            chosen[row] = int(column)
            taken.add(int(column))
    return chosen
