"""Filling slots over two hops: an expert that several ranks of a node replicate is sent to the node once.

By default each home sends an expert to each rank that replicates it. On several nodes it is sent once per node, to the
rank of the home's number in that node, and distributed from there (Janus, SIGCOMM 2023, fetches experts once per node):

    2 nodes of 2 ranks, rank 0 is home to expert 0, which ranks 2 and 3 replicate

                        inter-node        intra-node
        one hop         0 -> 2, 0 -> 3
        two hops        0 -> 2            2 -> 3

Two fillers run one after the other:

    inter-node    the ranks of equal number in their nodes    homes -> held: experts that the rank's node needs of these
    intra-node    the ranks of a node                         held -> slots

In the backward each adds up gradients in float32 in a fixed order and rounds them, so that one gradient per expert and
node is sent. Weights are identical to those of one hop, gradients are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from carpool.layout.expert_layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.metrics.counters import Meter
from carpool.replicas.slots import SlotFiller
from carpool.transport.nodes import hops_of, known_topology


def make_filler(layout: ExpertLayout, group: dist.ProcessGroup | None, meter: Meter | None = None) -> SlotFiller:
    """A filler with two hops, if the ranks are known to be on several nodes and this saves inter-node sends, else with
    one. Collective over the group."""
    if group is not None and crosses_once(layout, known_topology(group)):
        return NodeSlotFiller(layout, group, meter)
    return SlotFiller(layout, group, meter)


class NodeSlotFiller(SlotFiller):
    """Two fillers, one after the other; see the module's docstring.

    Attributes:
        hops: the inter-node and the intra-node filler.
    """

    def __init__(self, layout: ExpertLayout, group: dist.ProcessGroup, meter: Meter | None = None) -> None:
        ranks = hops_of(group)
        assert ranks.node is not None
        held = held_rows(layout, len(ranks.node_ranks))
        between = _of_ranks(ranks.rail_ranks, layout.homes, held)
        inside = _of_ranks(ranks.node_ranks, held, layout.slots)
        self._hops = SlotFiller(between, ranks.rail, meter), SlotFiller(inside, ranks.node, meter)
        super().__init__(layout, group, meter)

    @property
    def hops(self) -> tuple[SlotFiller, ...]:
        return self._hops

    def reset(self) -> None:
        super().reset()
        for hop in self._hops:
            hop.reset()

    @property
    def bytes_filled(self) -> int:
        return sum(hop.bytes_filled for hop in self._hops)

    @property
    def bytes_summed(self) -> int:
        return sum(hop.bytes_summed for hop in self._hops)

    def fill(self, home: torch.Tensor) -> torch.Tensor:
        between, inside = self._hops
        return inside.fill(between.fill(home))


def _of_ranks(ranks: Sequence[int], homes: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> ExpertLayout:
    """The layout of a subset of ranks, with its experts renumbered."""
    number = {expert: i for i, expert in enumerate(e for rank in ranks for e in homes[rank])} | {-1: -1}
    own, held = (tuple(tuple(number[e] for e in of[rank]) for rank in ranks) for of in (homes, slots))
    return ExpertLayout(own, held)


def crosses_once(layout: ExpertLayout, topology: Topology | None) -> bool:
    """Whether several ranks of a node replicate an expert of another node, and two hops are possible."""
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
    """For each rank, the experts that its node needs from the homes of the rank's rail: its own first, each in
    order."""
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
    """(W, W) experts that rank [i] sends to rank [j] to fill slots; gradients are sent in reverse."""
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
