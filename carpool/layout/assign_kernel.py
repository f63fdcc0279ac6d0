"""The CUDA side of `carpool.layout.assign`: one launch instead of a hundred.

PyTorch's version is some 110 small operations on (T, K, W), and a launch costs the host 10 to 40 us: more than the
rides that replicas save. Here a program takes ROWS tokens and holds the whole tile (ROWS, K, W) in registers, from the
table of slots to the choice; it reads the tokens' experts and writes their slots, nothing else.

                                                                    expert 1 of the layout in expert_layout.py
    table (E, W)    slot of each expert on each rank, -1: none          [1 5]
    held            which ranks may serve each choice                   [1 1]
    visits          ranks that the token visits anyway, then those that a loop adds for two or more choices
    cost            turn + 0 (own rank), W (visited), 2 W (others)      token 0, on rank 0: [0 5]  ->  slot 1

Where every expert has one slot the table has one column, and the same kernel is a look-up. Of sliced experts K counts
every slice of every choice, and E every slice of every expert.

The loop of `_share_rides` ends when no token of the tile gains by another round; then no later one would either.

A program is one warp up to 1024 elements in a tile, so that no reduction leaves it. Tiles of 512 elements, 16 for each
thread. All integers, so equal to PyTorch's bit for bit.

`count_slots` counts what the slots serve: a histogram per block of choices, added by integer atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, power_of_2, quick

if TYPE_CHECKING:
    from carpool.layout.expert_layout import ExpertLayout

# Beyond these a token's tile does not fit into registers, or its scores into int32.
LARGEST_TILE = 4096
LARGEST_K = 64

# Entries of a program that counts.
COUNTED = 1024


@quick
@triton.jit(do_not_specialize=["tokens", "source", "rounds"])
def _assign(  # type: ignore[no-untyped-def]
    expert_in, table, serving, slot_out, tokens, source, rounds, serving_t, serving_w, K: tl.constexpr,
    W: tl.constexpr, SLICES: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    row, k, rank = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KP), tl.arange(0, WP)
    entry = row[:, None] * K + k[None, :]
    inside = (row < tokens)[:, None] & (k < K)[None, :]
    expert = tl.load(expert_in + entry // SLICES, mask=inside, other=-1).to(tl.int32)
    if SLICES > 1:
        expert = tl.where(expert < 0, -1, expert * SLICES + (k % SLICES)[None, :])
    there = (expert >= 0)[:, :, None] & (rank < W)[None, None, :]
    slot = tl.load(table + expert[:, :, None] * W + rank[None, None, :], mask=there, other=-1)
    held = (slot >= 0).to(tl.int32)
    if LIMITED:
        at = row.to(tl.int64)[:, None] * serving_t + rank[None, :] * serving_w
        serves = tl.load(serving + at, mask=(row < tokens)[:, None] & (rank < W)[None, :], other=0).to(tl.int32)
        within = held * serves[:, None, :]
        held = tl.where((tl.max(within, 2) > 0)[:, :, None], within, held)
    number = tl.sum(held, 2)

    own = (rank == source).to(tl.int32)
    visits = tl.maximum(tl.max(tl.where((number == 1)[:, :, None], held, 0), 1), own[None, :])
    if W > 1:
        step: tl.constexpr = K * K * W + 1
        turn_by_rank = (rank[None, :] ^ row[:, None]) & (WP - 1)
        open = 1 - tl.max(held * visits[:, None, :], 2)
        left = rounds
        while left > 0:
            wanted = held * open[:, :, None]
            count = tl.sum(wanted, 1)
            alternatives = tl.sum(wanted * count[:, None, :], 2)
            score = (count * step - tl.sum(wanted * alternatives[:, :, None], 1)) * WP - turn_by_rank
            # Ranks have different turns, so just one is best. Where W is padded nothing is wanted.
            best = tl.max(score, 1)
            more = ((score == best[:, None]) & (count > 1)).to(tl.int32)
            visits = tl.maximum(visits, more)
            open = open * (1 - tl.max(held * more[:, None, :], 2))
            left = tl.where(tl.max(tl.max(more, 1), 0) > 0, left - 1, 0)

    # As Python's (place - token) % number; where nobody holds the expert, any number but 0.
    turn = tl.cumsum(held, 2) - 1 - (row[:, None] % tl.maximum(number, 1))[:, :, None]
    turn = tl.where(turn < 0, turn + number[:, :, None], turn)
    cost = turn + tl.where(own[None, :] > 0, 0, tl.where(visits > 0, W, 2 * W))[:, None, :]
    cost = tl.where(held > 0, cost, 3 * W)
    chosen = (cost == tl.min(cost, 2)[:, :, None]) & (held > 0)
    tl.store(slot_out + entry, tl.max(tl.where(chosen, slot, -1), 2), mask=inside)


def fits(top_k: int, num_ranks: int) -> bool:
    """Whether the kernel can do it."""
    return 0 < top_k <= LARGEST_K and power_of_2(top_k) * power_of_2(num_ranks) <= LARGEST_TILE


def tiling(tokens: int, width: int) -> tuple[int, int]:
    """(rows of a tile, warps of a program) for tokens of `width` elements."""
    return max(1, 512 // width), 1 if width <= 1024 else 4


def assign(
    expert_TK: torch.Tensor, layout: ExpertLayout, source_rank: int, serving_TW: torch.Tensor | None = None
) -> torch.Tensor:
    """slot_TK of `carpool.layout.assign`; fewer than 2^31 choices, and `fits`."""
    tokens, top_k = expert_TK.shape[0], expert_TK.shape[1] * layout.slices
    table = layout.copies_EC(expert_TK.device)
    if table.shape[1] == 1:
        serving_TW = None
    else:
        table = layout.slot_EW(expert_TK.device)
    num_ranks = table.shape[1]
    padded_k, padded_w = power_of_2(top_k), power_of_2(num_ranks)
    rows, warps = tiling(tokens, padded_k * padded_w)
    slot_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=expert_TK.device)
    if tokens:
        strides = (0, 0) if serving_TW is None else serving_TW.stride()
        _assign[(cdiv(tokens, rows),)](
            expert_TK.contiguous(), table, table if serving_TW is None else serving_TW, slot_TK, tokens, source_rank,
            layout.shared_rounds(top_k), *strides, K=top_k, W=num_ranks, SLICES=layout.slices,
            LIMITED=serving_TW is not None, ROWS=rows, KP=padded_k, WP=padded_w, num_warps=warps,
        )  # fmt: skip
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
