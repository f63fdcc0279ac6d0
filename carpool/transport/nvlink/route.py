"""The destinations of the tokens of one forward over NVLink, and how tokens that arrived are decoded and saved.

    token 0 of rank 1 of 4 chose experts on ranks 0 and 3; slabs are of 512 tokens, and rank 1 has the second on rank 3
    row_WT[:, 0]     0, -1, -1, 512

Only the device knows the number of tokens that arrive (`count_2W`, and `received_W` after the dispatch).

Tokens arrive in a lease, which later rides overwrite. Each sender fills a slab of the lease from the front, and only
the device knows how far. Tokens for experts of their own rank are not sent: they are read from the layer's input, which
autograd saves anyway. So a layer saves a copy of the tokens that arrived, not of the whole slabs:

    with an arena     memory follows the tokens that arrived
    without           a tensor of the worst case: a slab for each other rank

Cost on an H200: reading and writing 120 MB, about 60 us, compared with 300 us of the dispatch.

Tokens that were sent in FP8 are packets until they are `widened`. Experts that compute in FP8 read packets, and packets
are saved for them: half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from carpool.activations import HiddenStates, Ready
from carpool.activations.arrivals import Memory
from carpool.kernels.packets import pack
from carpool.transport.base import Route
from carpool.transport.nvlink.buffers import Lease
from carpool.transport.token_capacity import PairCapacity


@dataclass(kw_only=True)
class NVLinkRoute(Route):
    """Attributes:
    row_WT: (W, T) int32, each token's place in the buffer of rank w, -1: none.
    count_2W, choices_BW: int32, see plan_kernel.py.
    received_W: (W,) int32, tokens in each rank's slab, after the dispatch.
    parts, part_length: number of parts of the dispatch, and tokens of each; 0: not in parts.
    begins_NW: (parts + 1, W) int32, the first row of each part in the slab on each rank.
    ready: of the dispatch in flight to this rank.
    outputs: while parts are combined: MoE outputs, or gradients of tokens and of weights.
    pairs: the capacity that `num_pairs` is of; None: it suffices for any routing.
    """

    slot_TK: torch.Tensor
    weight_TK: torch.Tensor
    row_WT: torch.Tensor
    count_2W: torch.Tensor
    choices_BW: torch.Tensor
    received_W: torch.Tensor
    lease: Lease | None = field(default=None, repr=False)
    parts: int = 0
    part_length: int = 0
    begins_NW: torch.Tensor | None = None
    ready: Ready | None = None
    outputs: tuple[torch.Tensor, torch.Tensor | None] | None = None
    pairs: PairCapacity | None = None

    def again(self) -> NVLinkRoute:
        return replace(self, lease=None, parts=0, ready=None)

    def tokens_of(self, part: int) -> slice:
        return slice(*(min(self.num_tokens, n * self.part_length) for n in (part, part + 1)))

    def new_partial(self, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self.lease is not None, "new_partial comes after dispatch"
        return self.lease.view(self.lease.regions.partial, (self.num_rows, hidden), dtype)

    def tally(self, way: Literal["out", "back"], row_bytes: int, plain_bytes: int, choice_bytes: int) -> torch.Tensor:
        """The counters that the kernel increments; `Route.count` is for numbers that the host knows."""
        sent = row_bytes + self.top_k * choice_bytes
        return self.traffic.tally(self.verb(way), sent, plain_bytes + choice_bytes, self.row_WT.device)


@dataclass(frozen=True, kw_only=True)
class LeasedStates(HiddenStates):
    """See the module's docstring.

    Attributes:
        came_W: (W,) int32 on the device: tokens in each slab. The last slab is this rank's own, and empty.
        capacity: rows from slab to slab.
        wide_home: if tokens were sent as packets: the own tokens before encoding; `home` has their packets.
    """

    came_W: torch.Tensor
    capacity: int
    wide_home: torch.Tensor | None = None
    gaps: bool = True

    def widened(self, dtype: torch.dtype) -> HiddenStates:
        if self.wide_home is None:
            return self
        from carpool.kernels.packet_kernel import launch_dequantise

        hidden = self.wide_home.shape[1]
        data = launch_dequantise(self.data, self.came_W, self.capacity, hidden, dtype)
        return HiddenStates(data, hidden, home=self.wide_home, home_row=self.home_row, gaps=self.gaps)

    def packed(self) -> HiddenStates:
        if self.data.dtype == torch.uint8:
            return self
        home = None if self.home is None else pack(self.home)
        # Not in the arena yet: `saved` copies only the packets that arrived.
        data = pack(self.data, self.came_W, self.capacity)
        return replace(self, data=data, width=data.shape[1], home=home)

    def saved(self, arena: Memory | None) -> HiddenStates:
        data, came_W, width = self.data, self.came_W, self.width
        if arena is None:
            kept = HiddenStates(torch.empty_like(data), width)
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
                    # `.data`: autograd must not see other layers' saved activations in the arena as modified.
                    source = data[first : first + came].reshape(-1)
                    kept.data.data.view(-1)[start : start + source.numel()] = source
        return replace(kept, home=self.home, home_row=self.home_row, gaps=self.gaps)
