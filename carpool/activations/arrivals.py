"""What arrived at experts: tokens, and the slots that want them.

Tokens are read by number as rows, wherever they are: in a tensor, in an arena, or among a rank's own.

A transport that has the rows in a tensor of its own says `Rows.of(x_RH)`, and is done. One whose rows lie in a buffer
that others get next, or travel as FP8, has a subclass that says how they are widened, packed and kept
(`carpool.transport.nvlink.route`). Whoever reads rows sees no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from carpool.kernels.packets import pack


class Memory(Protocol):
    """Where rows may be kept whose number only the device knows: `carpool.activations.arena.Arena`."""

    def reserve(self, width: int, dtype: torch.dtype, count: torch.Tensor, slab: int = 0) -> Rows:
        """Room for rows; written by whoever asked."""

    def holds(self, start: torch.Tensor) -> bool:
        """Whether it is the start of a reservation that is still held."""


@dataclass(frozen=True)
class Rows:
    """Row r is number r % slab of slab r // slab. It begins at `data.view(-1)[start[r // slab] + (r % slab) * width]`,
    unless it is one of the `home` rows: home row i stands for row home_row + i, which is in `data` nowhere.

    Attributes:
        data: (N, width) rows if `start` is None; else flat memory in the rows' dtype. uint8: packets of FP8
            (`carpool.kernels.packets`).
        width: elements of a row.
        start: (slabs,) int64 on the device, in elements; negative: there was no room, do not touch. Whoever holds it,
            or a view of it, holds the place in the arena: autograd may save it like any tensor.
        slab: rows from one start to the next; 0: there is one slab.
        home: (T, width) rows that never left their rank, or None.
        home_row: the number of the first of them.
        gaps: True: a row that no slot wants is uninitialised, and nobody reads its sum. False: all rows are defined,
            and the sum of a row that no slot wants must be zero.
        count: (slabs,) integers on the device, how many rows there are in each slab; of rows in an arena.
        arena: in which they are, if `data` is its memory.
    """

    data: torch.Tensor
    width: int
    start: torch.Tensor | None = None
    slab: int = 0
    home: torch.Tensor | None = None
    home_row: int = 0
    gaps: bool = False
    count: torch.Tensor | None = None
    arena: Memory | None = None

    @classmethod
    def of(cls, rows: torch.Tensor) -> Rows:
        """The rows of a (N, width) tensor."""
        return Rows(rows, rows.shape[1])

    def widened(self, dtype: torch.dtype) -> Rows:
        """The same in `dtype`, if they travelled as packets of FP8."""
        return self

    def packed(self) -> Rows:
        """The same as packets of FP8: as they travelled, or made here. LOSSY."""
        if self.data.dtype == torch.uint8:
            return self
        assert self.start is None, "rows in an arena are packed before they are kept there"
        data, home = pack(self.data), None if self.home is None else pack(self.home)
        return replace(self, data=data, width=data.shape[1], home=home)

    def kept(self, arena: Memory | None) -> Rows:
        """The same, to be read until the backward: copied, if they lie in a buffer that others get next."""
        return self

    def contiguous(self, num_rows: int) -> torch.Tensor:
        """(num_rows, width): the rows themselves, or a copy. Rows that nobody wrote, and all rows if there was no room,
        may hold anything."""
        if self.start is None and self.home is None:
            return self.data.view(-1, self.width)[:num_rows]
        if self.start is None:
            there = self.data.view(-1, self.width)[:num_rows]
            rows = there.new_empty(num_rows, self.width)
            rows[: there.shape[0]] = there
        else:
            row = torch.arange(num_rows, device=self.data.device)
            slab = self.slab or max(1, num_rows)
            number = (row // slab).clamp(max=self.start.shape[0] - 1)
            first = (self.start[number] + row % slab * self.width).clamp(min=0)
            element = first[:, None] + torch.arange(self.width, device=row.device)
            rows = self.data[element.clamp(max=max(0, self.data.numel() - 1))]
        if self.home is not None:
            rows[self.home_row : self.home_row + self.home.shape[0]] = self.home
        return rows


@dataclass(frozen=True)
class Ready:
    """What is there of rows that come in parts, and what to wait for. Part p of a rank's tokens is a range of them;
    part p of what a rank receives is what comes of part p of every rank.

    Attributes:
        parts: how many.
        begins_NW: (parts + 1, W) int32 on the device: part p of slab s begins at its row begins_NW[p, s], and ends
            where the next begins. The last slab is the rows at home.
        slab: rows from slab to slab.
        group_RJ: (R, J) int32, slot * parts + part of each entry of slot_RJ; -1: none.
        awaited: what kernels that read the rows wait with; of the transport.
    """

    parts: int
    begins_NW: torch.Tensor
    slab: int
    group_RJ: torch.Tensor
    awaited: Any = None


@dataclass(frozen=True)
class Arrivals:
    """Rows that came, with what to do with them.

        Arrivals(Rows.of(x_RH), slot_RJ, weight_RJ, num_pairs)        of a transport whose rows are a tensor

    Attributes:
        rows: R rows of H, in the order of the sending ranks.
        slot_RJ: (R, J) int32 slots of this rank that want the row, -1: none.
        weight_RJ: (R, J) float32 routing weights, 0 where there is no slot.
        num_pairs: at most so many entries of slot_RJ are filled. Exactly so many, unless only the device knows.
        ready: None: all rows are there. Else they come in parts, and whoever reads them waits for these.
    """

    rows: Rows
    slot_RJ: torch.Tensor
    weight_RJ: torch.Tensor
    num_pairs: int
    ready: Ready | None = None

    def readable(self, packets: bool, dtype: torch.dtype) -> Arrivals:
        """The same, with rows as experts read them: packets of FP8 if `packets`, else rows in `dtype`."""
        rows = self.rows.packed() if packets else self.rows.widened(dtype)
        return self if rows is self.rows else replace(self, rows=rows)
