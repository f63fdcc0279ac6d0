"""The CUDA side of `carpool.layout.assign`: one launch instead of four, or of eight where experts are sliced.

A program looks up the slots of so many choices, or of their slices. `count_slots` counts choices: a histogram for each
block of them, added by integer atomics. All integers, so equal to PyTorch's bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, power_of_2, quick

# Slots of a program, and entries of one that counts.
BLOCK, COUNTED = 512, 1024


@quick
@triton.jit(do_not_specialize=["entries"])
def _look_up(  # type: ignore[no-untyped-def]
    expert_in, slot_of, slot_out, entries, SLICES: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    expert = tl.load(expert_in + entry // SLICES, mask=inside, other=-1).to(tl.int32)
    slot = tl.load(slot_of + expert * SLICES + entry % SLICES, mask=expert >= 0, other=-1)
    tl.store(slot_out + entry, slot, mask=inside)


def look_up(expert_TK: torch.Tensor, slot_E: torch.Tensor, slices: int) -> torch.Tensor:
    """slot_TK of `carpool.layout.assign`; fewer than 2^31 choices."""
    tokens, top_k = expert_TK.shape
    slot_TK = torch.empty(tokens, top_k * slices, dtype=torch.int32, device=expert_TK.device)
    if entries := slot_TK.numel():
        _look_up[(cdiv(entries, BLOCK),)](
            expert_TK.contiguous(), slot_E, slot_TK, entries, SLICES=slices, BLOCK=BLOCK, num_warps=4
        )
    return slot_TK


@quick
@triton.jit(do_not_specialize=["entries"])
def _count(slot, load, entries, places, BINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Entries past the last have a bin of their own, behind that for no expert.
    key = tl.load(slot + entry, mask=entry < entries, other=places + 1)
    count = tl.histogram(tl.where(key < 0, places, key), BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(load + bins, count.to(load.dtype.element_ty), mask=(count > 0) & (bins <= places), sem="relaxed")


def count_slots(slot_TK: torch.Tensor, load_P: torch.Tensor) -> None:
    """Add to `load_P` (int32 or int64) the choices of each slot, and in its last place those without an expert."""
    entries, places = slot_TK.numel(), len(load_P) - 1
    if entries:
        _count[(cdiv(entries, COUNTED),)](
            slot_TK.contiguous(), load_P, entries, places, BINS=power_of_2(places + 2), BLOCK=COUNTED, num_warps=4
        )
