"""The practical ceiling of the links: every rank pushes the same bytes to every other with plain copies.

Copies between the memories of two GPUs are done by copy engines; no SM is used, nothing is selected or added. What
they reach is what a transport's kernels can hope for. Rank r begins with rank r + 1, so that no two ranks write to the
same peer at a time, and one copy follows the other:

    rank 0 -> 1, 2, 3      rank 1 -> 2, 3, 0      rank 2 -> 3, 0, 1      rank 3 -> 0, 1, 2

(A stream for each peer, all copies at once, reaches less: 227 GB/s instead of 370 on 4 H200.)

The bytes are those that one row per (token, rank) takes for the routing in question, the mean over ranks, spread
evenly over the peers: a skewed routing is slower than its ceiling for that alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from carpool.bench.timing import Clock

LABEL = "copy engines"


class Ceiling:
    """Pushes up to `most_bytes` bytes per rank. Collective to make, and to call.

    Args:
        group: at least two ranks, each with a GPU, of one host.
        device: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, most_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.most_bytes, each = most_bytes, self._share(most_bytes)
        self.source = torch.zeros(each, dtype=torch.uint8, device=device)
        # One place per sender: nobody overwrites what another writes.
        total = self.num_ranks * each
        self.memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self.memory, group)
        order = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]
        self.targets = [handle.get_buffer(peer, (total,), torch.uint8)[self.rank * each :][:each] for peer in order]

    def push(self, num_bytes: int, clock: Clock, name: str) -> int:
        """Time one push of `num_bytes` bytes per rank as section (`LABEL`, name); returns the bytes in fact pushed."""
        size = self._share(num_bytes)
        with clock.section(LABEL, name):
            for target in self.targets:
                target[:size].copy_(self.source[:size], non_blocking=True)
        return size * (self.num_ranks - 1)

    def _share(self, num_bytes: int) -> int:
        """Bytes to each peer, a multiple of 16 and at least that."""
        return max(16, num_bytes // (self.num_ranks - 1) // 16 * 16)
