"""Filling slots from homes, and summing their gradients back to the homes.

In the plain layout there is nothing to do. Otherwise each home sends its expert's rows to the other ranks whose slots
want them, and in the backward every slot's gradient goes to the home, where they are added in float32 in order of
(rank, slot). A replica that is forgotten here trains on a part of its tokens and nothing looks wrong, so the parity
tests break this reduction on purpose and must fail.

    homes 0: [0, 1]  1: [2, 3]      slots 0: [0, 1]  1: [2, 3, 1]
    forward    rank 0 sends row 1 to rank 1, which copies its own rows beside it
    backward   rank 1 sends the gradient of its slot 2 to rank 0, which adds it to that of its own slot 1

What stays on its rank is copied, and a gradient with one summand is not summed. So a replica costs what it sends: a row
of weights out in the forward, one of gradients home in the backward.

A layer may run several times between two updates of its weights: in each micro-batch, again under activation
checkpointing, in every batch of an evaluation. Inside `SlotFiller.keep` the rows that arrived are kept, and travel
once; gradients go home in each backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from carpool.experts import ExpertWeights
from carpool.layout import ExpertLayout
from carpool.ordered_sum import ordered_sum
from carpool.stats import in_recompute


class _Indices(NamedTuple):
    """Of one rank, int64. Rows are of the homes.

    send_rows: rows to other ranks, by rank, in the order of their slots;  arrival_slots: where arriving rows go.
    own_rows, own_slots: what is copied on the rank.
    summed_rows: rows whose gradient has not just one summand, on this rank. `order_N` picks their summands, in order of
    (rank, slot), from what came back and `summed_slots` behind it; `summed_N` says which of these rows each is for.
    """

    send_rows: torch.Tensor
    arrival_slots: torch.Tensor
    own_rows: torch.Tensor
    own_slots: torch.Tensor
    summed_rows: torch.Tensor
    summed_slots: torch.Tensor
    order_N: torch.Tensor
    summed_N: torch.Tensor


class SlotFiller:
    """Moves rows of expert parameters between homes and slots of one layout.

    Args:
        layout: homes and slots.
        group: the expert-parallel process group; None for one rank.

    Attributes:
        send, receive: rows to and from each rank, none to oneself.
        bytes_filled, bytes_summed: what this rank has sent to other ranks since `reset`: weights, and gradients.
        load_P: with replicas, choices of this rank's tokens that each slot of the group served since `reset` (one more
            place for no expert), int64; without them a slot's load is its expert's, and this is None.
    """

    def __init__(self, layout: ExpertLayout, group: dist.ProcessGroup | None) -> None:
        self.layout, self.group = layout, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.load_P: torch.Tensor | None = None
        self.reset()
        self._kept: dict[str, torch.Tensor] | None = None
        self.num_slots = len(layout.slots[self.rank])
        self.num_homes = len(layout.homes[self.rank])
        self._plan()

    def reset(self) -> None:
        """Forget what was counted."""
        self.bytes_filled = self.bytes_summed = 0
        if self.load_P is not None:
            self.load_P.zero_()

    @torch.no_grad()
    def count(self, slot_TK: torch.Tensor) -> None:
        """Count what slots serve in a forward, where replicas share an expert's tokens. A recomputed one is not
        counted."""
        if not self.layout.num_replicas or in_recompute():
            return
        places = self.layout.num_ranks * self.layout.slots_per_rank
        if self.load_P is None:
            self.load_P = torch.zeros(places + 1, dtype=torch.int64, device=slot_TK.device)
        index = torch.where(slot_TK < 0, places, slot_TK).reshape(-1).long()
        self.load_P.scatter_add_(0, index, torch.ones_like(index))

    def _plan(self) -> None:
        layout, me, ranks = self.layout, self.rank, range(self.layout.num_ranks)
        row_of = {e: row for row, e in enumerate(layout.homes[me])}
        # (rank, slot, home row) of each slot that computes an expert of this rank, in that order.
        served = [(w, slot, row_of[e]) for w in ranks for slot, e in enumerate(layout.slots[w]) if e in row_of]
        sends = [[row for w, _, row in served if w == rank != me] for rank in ranks]
        mine = [(slot, *layout.home_of[e]) for slot, e in enumerate(layout.slots[me]) if e != -1]
        arriving = [[slot for slot, home, _ in mine if home == rank != me] for rank in ranks]
        own = [(slot, row) for slot, home, row in mine if home == me]
        self.send, self.receive = [len(rows) for rows in sends], [len(slots) for slots in arriving]

        copies = {row: [(w, slot) for w, slot, r in served if r == row] for row in row_of.values()}
        summed = [row for row, places in copies.items() if [w for w, _ in places] != [me]]
        place = {row: i for i, row in enumerate(summed)}
        own_summed = [slot for slot, row in own if row in place]
        came = iter(range(sum(self.send)))
        order, target = [], []
        for w, slot, row in served:
            back = next(came) if w != me else sum(self.send) + own_summed.index(slot) if row in place else -1
            if row in place:
                order.append(back)
                target.append(place[row])
        lists = (
            [row for rows in sends for row in rows],
            [slot for slots in arriving for slot in slots],
            [row for _, row in own],
            [slot for slot, _ in own],
            summed,
            own_summed,
            order,
            target,
        )
        self._travels = any(w != layout.home_of[e][0] for w in ranks for e in layout.slots[w] if e != -1)
        # Rows that stay, and keep their places, are copied as one piece.
        straight = list(range(len(own)))
        self.prefix = len(own) if lists[2] == straight == lists[3] else None
        self.full = len(mine) == self.num_slots
        self._indices = _Indices(*(torch.tensor(one, dtype=torch.int64) for one in lists))
        self._on_device: dict[torch.device, _Indices] = {}

    def fill(self, home: torch.Tensor, name: str) -> torch.Tensor:
        """(rows of this rank's homes, ...) -> (slots of this rank, ...), differentiable. Collective.

        `name` tells the layer's parameters apart."""
        if self.layout.slot_is_home:
            return home
        return _Fill.apply(home, self, name)

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Inside, weights do not change: what arrives in the first forward serves the others. All ranks together."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def indices(self, device: torch.device) -> _Indices:
        """Kept on the device, so that no step copies them there."""
        if device not in self._on_device:
            self._on_device[device] = _Indices(*(one.to(device) for one in self._indices))
        return self._on_device[device]

    def arrivals(self, home: torch.Tensor, name: str) -> torch.Tensor:
        """The rows of this rank's slots that live on other ranks, by rank, in the order of their slots."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        rows = home.detach()[self.indices(home.device).send_rows]
        self.bytes_filled += rows.nbytes
        arrived = self._exchange(rows, self.send, self.receive)
        if self._kept is not None:
            self._kept[name] = arrived
        return arrived

    def back(self, dslots: torch.Tensor) -> torch.Tensor:
        """Gradients of other ranks' slots for this rank's homes, in order of (rank, slot)."""
        rows = dslots[self.indices(dslots.device).arrival_slots]
        self.bytes_summed += rows.nbytes
        return self._exchange(rows, self.receive, self.send)

    def _exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if self.group is None or not self._travels:
            return rows
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group)
        return out


def fill_slots(home: ExpertWeights, filler: SlotFiller) -> ExpertWeights:
    """The weights of this rank's slots from those of its homes, differentiable. Collective unless slots are homes."""
    parts = zip(ExpertWeights._fields, home, strict=True)
    return ExpertWeights._make(None if rows is None else filler.fill(rows, name) for name, rows in parts)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, filler: SlotFiller, name: str) -> torch.Tensor:
        ctx.filler = filler
        index, shape = filler.indices(home.device), (filler.num_slots, *home.shape[1:])
        arrived = filler.arrivals(home, name)
        slots = home.new_empty(shape) if filler.full else home.new_zeros(shape)
        if filler.prefix is not None:
            slots[: filler.prefix] = home[: filler.prefix]
        else:
            slots[index.own_slots] = home[index.own_rows]
        slots[index.arrival_slots] = arrived
        return slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dslots: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        filler: SlotFiller = ctx.filler
        index = filler.indices(dslots.device)
        back = filler.back(dslots)
        dhome = dslots.new_empty(filler.num_homes, *dslots.shape[1:])
        if filler.prefix is not None:
            dhome[: filler.prefix] = dslots[: filler.prefix]
        else:
            dhome[index.own_rows] = dslots[index.own_slots]
        if len(index.summed_rows):
            summands = torch.cat([back, dslots[index.summed_slots]])[index.order_N]
            total = ordered_sum(summands.flatten(1), index.summed_N, len(index.summed_rows))
            dhome[index.summed_rows] = total.view(-1, *dslots.shape[1:]).to(dslots.dtype)
        return dhome, None, None
