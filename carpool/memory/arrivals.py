"""Rows that arrived: what experts know of a ride. They know nothing of the transport that brought the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from carpool.kernels.packing import pack
from carpool.memory.arena import Rows


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

    Attributes:
        x_RH: (R, H) rows, in the order of the sending ranks; fewer, if the last of the R are at home.
        slot_RJ: (R, J) int32 slots of this rank that want the row, -1: none. A row that nobody wants may hold anything.
        weight_RJ: (R, J) float32 routing weights, 0 where there is no slot.
        num_pairs: at most so many entries of slot_RJ are filled. Exactly so many, unless only the device knows.
        leased: x_RH is the transport's own buffer, which it overwrites later: copy what has to last.
        home_TH, home_row: rows of this rank's own tokens that it keeps for itself need no ride: where given, they stand
            for rows home_row, home_row + 1, ... of x_RH, which are not written there.
        fp8_hidden: 0, or H: then x_RH are packets (R, bytes) uint8 of codes and scales (`carpool.kernels.packets`).
            `widened` makes rows of them; `packed` makes packets of rows.
        home_packet_TB: where rows travelled as FP8: home_TH, which are rows, as packets.
        came_W, slab: if x_RH lies in slabs of so many rows, one for each sender: (W,) int32 on the device, how many are
            in each (the last is this rank's own, and empty).
        sums_unwanted: whether `combine` reads the partial sums of rows that nobody wants; they must be zero then.
        ready: None: all rows are there. Else they come in parts, and whoever reads them waits for these.
    """

    x_RH: torch.Tensor
    slot_RJ: torch.Tensor
    weight_RJ: torch.Tensor
    num_pairs: int
    leased: bool = False
    sums_unwanted: bool = True
    home_TH: torch.Tensor | None = None
    home_row: int = 0
    came_W: torch.Tensor | None = None
    slab: int = 0
    fp8_hidden: int = 0
    home_packet_TB: torch.Tensor | None = None
    ready: Ready | None = None

    @property
    def rows(self) -> Rows:
        """All rows that came, those at home included: rows once `widened`, packets once `packed`."""
        assert self.home_packet_TB is None, "widen or pack them first"
        return Rows(self.x_RH, self.x_RH.shape[1], home=self.home_TH, home_row=self.home_row)

    def widened(self, dtype: torch.dtype) -> Arrivals:
        """The same, with rows that travelled as FP8 back in `dtype`, in a tensor of their own."""
        if not self.fp8_hidden:
            return self
        from carpool.kernels.packet_kernel import launch_dequantise

        assert self.came_W is not None
        x_RH = launch_dequantise(self.x_RH, self.came_W, self.slab, self.fp8_hidden, dtype)
        return replace(self, x_RH=x_RH, leased=False, fp8_hidden=0, home_packet_TB=None)

    def packed(self) -> Arrivals:
        """The same as packets, for experts that compute on these: as they travelled, or quantised here. LOSSY."""
        if self.home_packet_TB is not None:
            return replace(self, home_TH=self.home_packet_TB, home_packet_TB=None)
        if self.fp8_hidden:
            return self
        home = None if self.home_TH is None else pack(self.home_TH)
        # A lease's packets still go to the arena, where they take the room of those that came.
        leased = self.leased and self.came_W is not None
        x_RH = pack(self.x_RH, self.came_W, self.slab)
        return replace(self, x_RH=x_RH, home_TH=home, leased=leased, fp8_hidden=self.x_RH.shape[1])
