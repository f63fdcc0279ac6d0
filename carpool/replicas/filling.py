"""Which rows of experts' parameters travel from rank to rank to fill slots.

Without nodes each home sends a row to each rank that wants it. On several nodes a row that several ranks of a node want
crosses once, to the rank there that has the home's number in its node, and is shared from there (Janus, SIGCOMM 2023):

    2 nodes of 2 ranks, rank 0 is home to expert 0, which ranks 2 and 3 want

                        between nodes    inside
        one hop         0 -> 2, 0 -> 3
        two hops        0 -> 2           2 -> 3
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from carpool.layout.expert_layout import ExpertLayout
from carpool.layout.topology import Topology


def crosses_once(layout: ExpertLayout, topology: Topology | None) -> bool:
    """Whether several ranks of a node want an expert of another one, and two hops can bring it."""
    if topology is None or topology.num_nodes == 1 or layout.slices > 1:
        return False
    try:
        per_node = topology.num_ranks // topology.even_nodes()
    except ValueError:
        return False
    if not all(any(layout.homes[number::per_node]) for number in range(per_node)):
        return False
    # A node that computes nothing has nothing to share.
    busy = {topology.node_of[rank] for rank, experts in enumerate(layout.slots) if set(experts) - {-1}}
    if len(busy) < topology.num_nodes:
        return False
    far = [
        (expert, topology.node_of[rank])
        for rank, experts in enumerate(layout.slots)
        for expert in experts
        if expert != -1 and topology.node_of[layout.home_of[expert][0]] != topology.node_of[rank]
    ]
    return len(set(far)) < len(far)


def held_rows(layout: ExpertLayout, per_node: int) -> list[list[int]]:
    """For each rank, the experts that its node wants of the homes of its number: its own first, each in order."""
    rails = [[e for homes in layout.homes[number::per_node] for e in homes] for number in range(per_node)]
    held: list[list[int]] = []
    for first in range(0, layout.num_ranks, per_node):
        ranks = range(first, first + per_node)
        wanted = {e for rank in ranks for e in layout.slots[rank]}
        for rank, rail in zip(ranks, rails, strict=True):
            own = [e for e in layout.homes[rank] if e in wanted]
            mine = set(own)
            held.append([*own, *(e for e in rail if e in wanted and e not in mine)])
    return held


def rows_filled(layout: ExpertLayout, topology: Topology | None) -> npt.NDArray[np.int64]:
    """(W, W) rows that rank [i] sends to rank [j] to fill slots; their gradients go the other way."""
    sent_WW = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    if not crosses_once(layout, topology):
        for rank, experts in enumerate(layout.slots):
            for expert in experts:
                if expert != -1:
                    sent_WW[layout.home_of[expert][0], rank] += 1
    else:
        assert topology is not None
        per_node = topology.num_ranks // topology.num_nodes
        for rank, held in enumerate(held_rows(layout, per_node)):
            for expert in held:
                sent_WW[layout.home_of[expert][0], rank] += 1
        for rank, experts in enumerate(layout.slots):
            for expert in experts:
                if expert != -1:
                    sent_WW[rank - rank % per_node + layout.home_of[expert][0] % per_node, rank] += 1
    np.fill_diagonal(sent_WW, 0)
    return sent_WW
