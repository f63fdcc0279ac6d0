"""Where each row of one forward goes over NVLink: what `NVLink.plan` finds out, and what verbs leave for each other.

    token 0 of rank 1 of 4 chose experts on ranks 0 and 3; slabs are of 512 rows, and rank 1 has the second on rank 3
    row_WT[:, 0]     0, -1, -1, 512

How many rows come is not here: only the device knows (`count_2W`, and `received_W` after the dispatch).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from carpool.activations import Ready
from carpool.transport.base import Route
from carpool.transport.nvlink.buffers import Lease


@dataclass(kw_only=True)
class NVLinkRoute(Route):
    """Attributes:
    row_WT: (W, T) int32, each token's row in rank w's buffer, -1: none.
    count_2W, choices_BW: int32, see plan_kernel.py.
    received_W: (W,) int32, rows in each rank's slab, once dispatched.
    parts, part_length: in how many parts the tokens ride, and tokens of each; 0: not in parts.
    begins_NW: (parts + 1, W) int32, the first row of each part in the slab on each rank.
    ready: of the rows that are under way to this rank.
    sums: of tokens, while parts are combined: rows, and gradients of weights.
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
    sums: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def again(self) -> NVLinkRoute:
        return replace(self, lease=None, parts=0, ready=None)

    def tokens_of(self, part: int) -> slice:
        return slice(*(min(self.num_tokens, n * self.part_length) for n in (part, part + 1)))

    def new_partial(self, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self.lease is not None, "new_partial comes after dispatch"
        return self.lease.view(self.lease.regions.partial, (self.num_rows, hidden), dtype)

    def tally(self, way: Literal["out", "back"], row_bytes: int, plain_bytes: int, choice_bytes: int) -> torch.Tensor:
        """Where the kernel counts: see `Route.count`, which does it for rows that the host knows."""
        sent = row_bytes + self.top_k * choice_bytes
        return self.traffic.tally(self.verb(way), sent, plain_bytes + choice_bytes, self.row_WT.device)
