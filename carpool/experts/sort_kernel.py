"""The CUDA side of `sort_pairs`: a stable counting sort in three kernels, none of which waits for another.

    slot_RJ     [2 0 | 0 - | 1 0]       blocks of 2 entries, 3 slots, "-" is counted in a bin of its own

    count       how many of each bin in each block, and where each bin starts in the block once that is sorted
                [1 0 1 0] [1 0 0 1] [1 1 0 0]            totals [3 1 1 1]
    scan        one program per bin adds up: where the bin starts, then where each block's share of it starts
                bin 0: 0, 1, 2   bin 1: 3, 3, 3   bin 2: 4, 5, 5   bin -: 5, 5, 6          offsets [3 4 5]
    scatter     each block sorts its keys (slot, index in block); entry i of the sorted block goes to
                (where its share of the bin starts) + i - (where the bin starts in the block)

The keys of a block differ, so sorting them is stable whatever the sorting network does; totals are added by integer
atomics, whose order changes nothing. So the result is the same each time. Cost: slot_RJ is read twice, `order` and
`position` are written once, and the tables have one integer per block of 1024 entries and bin.

Ranking by comparing all entries of a block with each other would need 10 to 20 us of arithmetic for 256k entries, and
`torch.sort` moves 64-bit indices through several passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, power_of_2, quick

BLOCK = 1024
CHUNK = 256


@quick
@triton.jit
def _count(slot, counts, starts, totals, entries, slots, BINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(slot + entry, mask=entry < entries, other=-1)
    key = tl.where((key < 0) | (key >= slots), slots, key)
    count = tl.histogram(key, BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + block * BINS + bins, count)
    tl.store(starts + block * BINS + bins, tl.cumsum(count, 0) - count)
    tl.atomic_add(totals + bins, count, mask=count > 0, sem="relaxed")


@quick
@triton.jit
def _scan(counts, starts, totals, offsets, blocks, slots, BINS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins)
    begin = tl.sum(tl.where(bins < own, total, 0), 0)
    tl.store(offsets + own, begin + tl.sum(tl.where(bins == own, total, 0), 0), mask=own < slots)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        inside = block < blocks
        count = tl.load(counts + block * BINS + own, mask=inside, other=0)
        start = tl.load(starts + block * BINS + own, mask=inside, other=0)
        # From now on: what to add to an entry's place in its sorted block to get its place in the whole.
        tl.store(starts + block * BINS + own, begin + tl.cumsum(count, 0) - count - start, mask=inside)
        begin += tl.sum(count, 0)


@quick
@triton.jit
def _scatter(slot, shifts, order, position, entries, pairs, slots, BINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    entry = block * BLOCK + index
    key = tl.load(slot + entry, mask=entry < entries, other=-1)
    key = tl.where((key < 0) | (key >= slots), slots, key)
    both = tl.sort(key * BLOCK + index)
    key = both // BLOCK
    source = block * BLOCK + both % BLOCK
    place = tl.load(shifts + block * BINS + key) + index
    wanted = key < slots
    # Entries without a slot come last; there `order` only has to be an index that may be read.
    tl.store(order + place, tl.where(wanted, source, 0), mask=place < pairs)
    tl.store(position + source, tl.where(wanted, place, -1), mask=source < entries)


def sort_pairs(
    slot_RJ: torch.Tensor, num_slots: int, num_pairs: int, block: int = BLOCK, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order_P, offsets_S, position_RJ) of `carpool.experts.pairs.sort_pairs`, all int32.

    Args:
        slot_RJ: contiguous int32, at least one entry; fewer than 2^31 entries.
        num_slots: at least 1, at most a few thousand (one bin each).
        num_pairs: length of order_P, at most the number of entries.
        block, chunk: entries per block, blocks per step of the scan; tests make them small.
    """
    entries, device = slot_RJ.numel(), slot_RJ.device
    blocks, bins = cdiv(entries, block), power_of_2(num_slots + 1)
    counts, starts = torch.empty(2, blocks, bins, dtype=torch.int32, device=device)
    totals = torch.zeros(bins, dtype=torch.int32, device=device)
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    offsets_S = torch.empty(num_slots, dtype=torch.int32, device=device)
    position_RJ = torch.empty_like(slot_RJ)
    _count[(blocks,)](slot_RJ, counts, starts, totals, entries, num_slots, BINS=bins, BLOCK=block, num_warps=4)
    _scan[(num_slots + 1,)](counts, starts, totals, offsets_S, blocks, num_slots, BINS=bins, CHUNK=chunk, num_warps=4)
    _scatter[(blocks,)](
        slot_RJ, starts, order_P, position_RJ, entries, num_pairs, num_slots, BINS=bins, BLOCK=block, num_warps=4
    )
    return order_P, offsets_S, position_RJ
