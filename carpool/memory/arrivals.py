"""Rows that arrived: what experts know of a ride. They know nothing of the transport that brought the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from carpool.memory.rows import Rows


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
