"""Filling slots from homes, and summing their gradients back to the homes.

In the plain layout there is nothing to do. Otherwise each home sends its expert's rows to the ranks whose slots
want them, and in the backward every slot's gradient goes to the home, where they are added in float32 in order of
(rank, slot). A replica that is forgotten here trains on a part of its tokens and nothing looks wrong, so the parity
tests break this reduction on purpose and must fail.

    homes 0: [0, 1]  1: [2, 3]      slots 0: [0, 1]  1: [2, 3, 1]
    rank 0 sends itself rows 0, 1 and rank 1 row 1;  rank 1 sends itself rows 0, 1
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from carpool.experts import ExpertWeights
from carpool.layout import ExpertLayout
from carpool.ordered_sum import ordered_sum


class SlotFiller:
    """Moves rows of expert parameters between homes and slots of one layout.

    Args:
        layout: homes and slots.
        group: the expert-parallel process group; None for one rank.
    """

    def __init__(self, layout: ExpertLayout, group: dist.ProcessGroup | None) -> None:
        self.layout, self.group = layout, group
        self.rank = dist.get_rank(group) if group is not None else 0
        ranks = range(layout.num_ranks)
        # What rank r sends to rank w: the home rows of the experts in w's slots that live on r, in slot order.
        sends = [self._rows_for(layout.slots[w]) for w in ranks]
        self.send = [len(rows) for rows in sends]
        self._send_rows = torch.tensor([row for rows in sends for row in rows], dtype=torch.int64)
        mine = layout.slots[self.rank]
        arriving = [[slot for slot, e in enumerate(mine) if e != -1 and layout.home_of[e][0] == r] for r in ranks]
        self.receive = [len(slots) for slots in arriving]
        self._arrival_slots = torch.tensor([slot for slots in arriving for slot in slots], dtype=torch.int64)
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, home: torch.Tensor) -> torch.Tensor:
        """(rows of this rank's homes, ...) -> (slots of this rank, ...), differentiable. Collective."""
        if self.layout.slot_is_home:
            return home
        return _Fill.apply(home, self)

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(home rows to send, slots that arriving rows go to), kept on the device so that no step copies them there."""
        if device not in self._on_device:
            self._on_device[device] = self._send_rows.to(device), self._arrival_slots.to(device)
        return self._on_device[device]

    def _rows_for(self, slots: tuple[int, ...]) -> list[int]:
        return [self.layout.home_of[e][1] for e in slots if e != -1 and self.layout.home_of[e][0] == self.rank]

    def exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if self.group is None:
            return rows
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group)
        return out


def fill_slots(home: ExpertWeights, filler: SlotFiller) -> ExpertWeights:
    """The weights of this rank's slots from those of its homes, differentiable. Collective unless slots are homes."""
    up_bias, down_bias = (None if w is None else filler.fill(w) for w in (home.up_bias_SF, home.down_bias_SH))
    return ExpertWeights(filler.fill(home.up_SFH), filler.fill(home.down_SHF), up_bias, down_bias)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, filler: SlotFiller) -> torch.Tensor:
        ctx.filler, ctx.num_rows = filler, home.shape[0]
        send_rows, arrival_slots = filler.indices(home.device)
        arrived = filler.exchange(home[send_rows], filler.send, filler.receive)
        slots = home.new_zeros(len(filler.layout.slots[filler.rank]), *home.shape[1:])
        slots[arrival_slots] = arrived
        return slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dslots: torch.Tensor) -> tuple[torch.Tensor, None]:
        filler: SlotFiller = ctx.filler
        send_rows, arrival_slots = filler.indices(dslots.device)
        back = filler.exchange(dslots[arrival_slots], filler.receive, filler.send)
        dhome = ordered_sum(back.flatten(1), send_rows, ctx.num_rows)
        return dhome.view(ctx.num_rows, *dslots.shape[1:]).to(dslots.dtype), None
