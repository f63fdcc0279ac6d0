"""What a dispatch delivers to a rank: tokens, and the slots that compute each of them.

`HiddenStates` is a matrix that is read row by row, wherever its rows are stored: in a tensor, in an arena, or, for
tokens that stay on their rank, in the layer's input.

A transport that receives into a tensor of its own returns `HiddenStates.of(x_RH)`. A transport that receives into a
shared buffer, or in FP8, returns a subclass that defines how tokens are widened, packed and saved
(`carpool.transport.nvlink.route`). Kernels that read the tokens need not know the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from carpool.kernels.packets import pack


class Memory(Protocol):
    """Memory for matrices whose number of rows only the device knows: `carpool.activations.arena.Arena`."""

    def reserve(self, width: int, dtype: torch.dtype, count: torch.Tensor, slab: int = 0) -> HiddenStates:
        """Reserve memory for `count` rows; the caller writes them."""

    def holds(self, start: torch.Tensor) -> bool:
        """Whether `start` belongs to a reservation that has not been released."""


@dataclass(frozen=True)
class HiddenStates:
    """A matrix of hidden states, one per row: tokens that arrived, their gradients, or pre-activations of experts.

    Row r is row r % slab of slab r // slab. It begins at `data.view(-1)[start[r // slab] + (r % slab) * width]`. Rows
    from home_row on are stored in `home` instead: row home_row + i is `home[i]`, and has no place in `data`.

    Attributes:
        data: (N, width) if `start` is None; else flat memory of the same dtype. uint8: packets of FP8
            (`carpool.kernels.packets`).
        width: elements of a row.
        start: (slabs,) int64 on the device, in elements. Negative: the arena was too small, and nothing may be read or
            written. This tensor, or any view of it, keeps the reservation alive, so autograd can save it as usual.
        slab: rows from one start to the next; 0: there is one slab.
        home: (T, width) hidden states that did not leave their rank, or None.
        home_row: the row number of the first of these.
        gaps: True: rows that no slot computes are uninitialised, and their MoE outputs are not read. False: all rows
            are defined, and the output of a row that no slot computes must be zero.
        count: (slabs,) integers on the device: valid rows of each slab, if the matrix is in an arena.
        arena: the arena whose memory `data` is, or None.
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
    def of(cls, rows: torch.Tensor) -> HiddenStates:
        """Wrap a (N, width) tensor."""
        return HiddenStates(rows, rows.shape[1])

    def widened(self, dtype: torch.dtype) -> HiddenStates:
        """The same in `dtype`: decoded if they were sent as packets of FP8."""
        return self

    def packed(self) -> HiddenStates:
        """The same as packets of FP8: as they were sent, or encoded here. LOSSY."""
        if self.data.dtype == torch.uint8:
            return self
        assert self.start is None, "rows in an arena are packed before they are kept there"
        data, home = pack(self.data), None if self.home is None else pack(self.home)
        return replace(self, data=data, width=data.shape[1], home=home)

    def saved(self, arena: Memory | None) -> HiddenStates:
        """The same, valid until the backward: copied, if they are in a buffer that later rides reuse."""
        return self

    def contiguous(self, num_rows: int) -> torch.Tensor:
        """(num_rows, width): a view, or a copy. Rows that were never written are undefined, and so are all rows if the
        arena was too small."""
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
    """Which tokens have arrived of a dispatch in parts, and what kernels wait for. Part p of a rank's tokens is a range
    of them; part p of its arrivals is what part p of every rank sends to it.

    Attributes:
        begins_NW: (parts + 1, W) int32 on the device: part p of slab s begins at its row begins_NW[p, s], and ends
            where the next begins. The last slab is the tokens that stay on this rank.
        slab: rows from slab to slab.
        group_RJ: (R, J) int32, slot * parts + part of each entry of slot_RJ; -1: none.
        awaited: the transport's handle with which kernels wait for tokens.
    """

    parts: int
    begins_NW: torch.Tensor
    slab: int
    group_RJ: torch.Tensor
    awaited: Any = None


@dataclass(frozen=True)
class Arrivals:
    """Tokens that arrived at a rank, with the slots that compute them.

        Arrivals(HiddenStates.of(x_RH), slot_RJ, weight_RJ, num_pairs)        of a transport that receives into a tensor

    Attributes:
        tokens: (R, H), in the order of the sending ranks.
        slot_RJ: (R, J) int32 slots of this rank that compute the token, -1: none.
        weight_RJ: (R, J) float32 routing weights, 0 where there is no slot.
        num_pairs: filled entries of slot_RJ; an upper bound if only the device knows their number.
        ready: None: all tokens have arrived. Else they arrive in parts, for which the reading kernels wait.
    """

    tokens: HiddenStates
    slot_RJ: torch.Tensor
    weight_RJ: torch.Tensor
    num_pairs: int
    ready: Ready | None = None

    def readable(self, packets: bool, dtype: torch.dtype) -> Arrivals:
        """The same, with tokens as experts read them: packets of FP8 if `packets`, else in `dtype`."""
        tokens = self.tokens.packed() if packets else self.tokens.widened(dtype)
        return self if tokens is self.tokens else replace(self, tokens=tokens)
