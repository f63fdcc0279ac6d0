"""The kernel that lets a stream wait for another's rides: `carpool.schedule.priority.Links`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import quick

PATIENCE = 32768
"""Looks. Each reads the word past the first cache, about 0.7 us: some 20 ms."""


@quick
@triton.jit(do_not_specialize=["patience"])
def wait_kernel(looked, patience):  # type: ignore[no-untyped-def]
    """looked: (2,) int32. Returns when [0] is 0, or after that many looks; adds those in vain to [1]."""
    looks = patience * 0
    taken = tl.load(looked, volatile=True)
    while (taken != 0) & (looks < patience):
        looks += 1
        taken = tl.load(looked, volatile=True)
    if looks > 0:
        tl.atomic_add(looked + 1, looks)


def launch(looked: torch.Tensor, patience: int = PATIENCE) -> None:
    """In the current stream."""
    wait_kernel[(1,)](looked, patience, num_warps=1)
