"""Slots that are filled across nodes: what several ranks of a node want crosses once, and is shared inside it.

Two fillers do it one after the other, each over ranks of its own (`carpool.replicas.filling` has a picture):

    between    the ranks of equal number in their nodes    homes -> held: what a rank's node wants of its number's homes
    inside     the ranks of a node                         held -> slots

In the backward each adds up gradients in float32 in a fixed order and rounds them, so that one gradient of an expert
crosses for a node. Weights are those of one filler, gradients are equal to rounding.

Inside `keep_slots` the first hop is ahead of its layer and late behind it, as one filler is; the second is waited for.
It costs memory for what is held, once for each parameter.

Source: Janus (SIGCOMM 2023) fetches an expert's weights once for a node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from carpool.layout import ExpertLayout
from carpool.metrics.counters import Meter
from carpool.replicas.filling import crosses_once, held_rows
from carpool.replicas.slots import SlotFiller
from carpool.transport.nodes import hops_of, known_topology


def make_filler(layout: ExpertLayout, group: dist.ProcessGroup | None, meter: Meter | None = None) -> SlotFiller:
    """Over two hops where the ranks are known to lie on several nodes, and fewer rows then cross. All ranks of the
    group together."""
    if group is not None and crosses_once(layout, known_topology(group)):
        return NodeSlotFiller(layout, group, meter)
    return SlotFiller(layout, group, meter)


class NodeSlotFiller(SlotFiller):
    """Two fillers, one after the other; see the module's docstring.

    Attributes:
        hops: between nodes, and inside.
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

    @property
    def bytes_ahead(self) -> int:
        return sum(hop.bytes_ahead for hop in self._hops)

    def fill(self, home: torch.Tensor, name: str) -> torch.Tensor:
        between, inside = self._hops
        return inside.fill(between.fill(home, name), name)

    def start_next(self) -> None:
        self._hops[-1].start_next()


def _of_ranks(ranks: Sequence[int], homes: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> ExpertLayout:
    """The layout of some ranks, whose homes hold some of the experts, which are numbered anew."""
    number = {expert: i for i, expert in enumerate(e for rank in ranks for e in homes[rank])} | {-1: -1}
    own, held = (tuple(tuple(number[e] for e in of[rank]) for rank in ranks) for of in (homes, slots))
    return ExpertLayout(own, held)
