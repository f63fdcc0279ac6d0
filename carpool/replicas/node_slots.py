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

import torch.distributed as dist

from carpool.layout.topology import Topology
from carpool.metrics.counters import Meter
from carpool.replicas.slots import SlotFiller
from carpool.transport.nodes import hops_of, known_topology

Lists = Sequence[Sequence[int]]


def make_fillers(
    homes: Lists, slots: Lists, group: dist.ProcessGroup, meter: Meter | None = None
) -> tuple[SlotFiller, ...]:
    """The fillers of slots, which run one after the other: two, if the ranks are known to be on several nodes and this
    saves inter-node sends, else one. Collective over the group. Arguments as of `SlotFiller`."""
    if not crosses_once(homes, slots, known_topology(group)):
        return (SlotFiller(homes, slots, group, meter),)
    ranks = hops_of(group)
    assert ranks.node is not None and ranks.rail is not None
    held = held_rows(homes, slots, len(ranks.node_ranks))
    own, between = ([of[rank] for rank in ranks.rail_ranks] for of in (homes, held))
    inside, last = ([of[rank] for rank in ranks.node_ranks] for of in (held, slots))
    return SlotFiller(own, between, ranks.rail, meter), SlotFiller(inside, last, ranks.node, meter)


def crosses_once(homes: Lists, slots: Lists, topology: Topology | None) -> bool:
    """Whether several ranks of a node replicate an expert of another node, and two hops are possible."""
    if topology is None or topology.num_nodes == 1:
        return False
    try:
        per_node = topology.num_ranks // topology.even_nodes()
    except ValueError:
        return False
    if not all(any(homes[number::per_node]) for number in range(per_node)):
        return False
    home_E = {expert: topology.node_of[rank] for rank, experts in enumerate(homes) for expert in experts}
    far = [
        (expert, topology.node_of[rank])
        for rank, experts in enumerate(slots)
        for expert in experts
        if expert != -1 and home_E[expert] != topology.node_of[rank]
    ]
    return len(set(far)) < len(far)


def held_rows(homes: Lists, slots: Lists, per_node: int) -> list[list[int]]:
    """For each rank, the experts that its node needs from the homes of the rank's rail: its own first, each in
    order."""
    rails = [[e for own in homes[number::per_node] for e in own] for number in range(per_node)]
    held: list[list[int]] = []
    for first in range(0, len(homes), per_node):
        ranks = range(first, first + per_node)
        wanted = {e for rank in ranks for e in slots[rank]}
        for rank, rail in zip(ranks, rails, strict=True):
            mine = set(homes[rank])
            held.append([*homes[rank], *(e for e in rail if e in wanted and e not in mine)])
    return held
