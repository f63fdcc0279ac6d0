"""Rows as they arrive over NVLink: in a lease, which the next rides overwrite.

Each sender fills a slab of the lease from the front, and only the device knows how far. A rank's rows for itself do not
travel: they are its own tokens, which autograd keeps anyway. So what a layer keeps for its backward is a copy of the
rows that came, not of the places of those that could have:

    with an arena     memory follows the rows that came
    without           a tensor of the worst case: a slab for each other rank

Cost on an H200: reading and writing 120 MB, about 60 us, beside a dispatch of 300.

Rows that travelled as FP8 are packets until they are `widened`. Experts that compute in FP8 read packets, and packets
are what is kept for them: half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from carpool.activations import Rows
from carpool.activations.arrivals import Memory
from carpool.kernels.packets import pack


@dataclass(frozen=True, kw_only=True)
class LeasedRows(Rows):
    """See the module's docstring.

    Attributes:
        came_W: (W,) int32 on the device: how many rows are in each slab. The last is this rank's own, and empty.
        capacity: rows from slab to slab.
        wide_home: if rows travelled as packets: those at home as they were, for `home` are packets too.
    """

    came_W: torch.Tensor
    capacity: int
    wide_home: torch.Tensor | None = None
    gaps: bool = True

    def widened(self, dtype: torch.dtype) -> Rows:
        if self.wide_home is None:
            return self
        from carpool.kernels.packet_kernel import launch_dequantise

        hidden = self.wide_home.shape[1]
        data = launch_dequantise(self.data, self.came_W, self.capacity, hidden, dtype)
        return Rows(data, hidden, home=self.wide_home, home_row=self.home_row, gaps=self.gaps)

    def packed(self) -> Rows:
        if self.data.dtype == torch.uint8:
            return self
        home = None if self.home is None else pack(self.home)
        # Still to be copied when they are kept: to the arena, where packets take the room of the rows that came.
        data = pack(self.data, self.came_W, self.capacity)
        return replace(self, data=data, width=data.shape[1], home=home)

    def kept(self, arena: Memory | None) -> Rows:
        data, came_W, width = self.data, self.came_W, self.width
        if arena is None:
            kept = Rows(torch.empty_like(data), width)
        else:
            kept = arena.reserve(width, data.dtype, came_W, self.capacity)
        if data.is_cuda:
            from carpool.transport.nvlink.keep_kernel import copy_slabs

            copy_slabs(data, came_W, self.capacity, kept)
        else:
            for number, came in enumerate(came_W.tolist()):
                first = number * self.capacity
                start = first * width if kept.start is None else int(kept.start[number])
                if start >= 0:
                    # `.data`: what other layers keep in the arena must not look modified to autograd.
                    source = data[first : first + came].reshape(-1)
                    kept.data.data.view(-1)[start : start + source.numel()] = source
        return replace(kept, home=self.home, home_row=self.home_row, gaps=self.gaps)
