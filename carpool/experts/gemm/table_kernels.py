"""Three small kernels that prepare the inputs of the fused products, and finish their sums.

    row_addresses   the address of each pair's row: an int64 for each pair
    tile_table      the tiles of pairs, and the slots by size
    sum_shares      gradients of routing weights, from the shares that neighbouring tiles computed

Each runs once for the forward or the backward; the products (gemm_tiles.py) then read addresses and tiles, without the
host. The number of pairs is in device memory: see pair_kernels.py.

    rows 0-3 of a slab begin at address 4096 and are 256 bytes long; order_P 5, 0, 6 and two columns
    address_P   4096 + 2 * 256, 4096, 4096 + 3 * 256
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.experts.pair_kernels import programs
from carpool.kernels.quick import cdiv, power_of_2, quick


@quick
@triton.jit
def _row_addresses(  # type: ignore[no-untyped-def]
    rows, start, home, order, offsets, out, slots, slab, home_row, home_rows, J: tl.constexpr, WIDTH: tl.constexpr,
    BYTES: tl.constexpr, HAS_START: tl.constexpr, HAS_HOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.load(offsets + slots - 1)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        pair = block * BLOCK + tl.arange(0, BLOCK)
        live = pair < count
        row = tl.load(order + pair, mask=live, other=0) // J
        address = rows.to(tl.int64) + row.to(tl.int64) * (WIDTH * BYTES)
        if HAS_START:
            away = live
            if HAS_HOME:
                # Rows at home have no slab.
                away = live & (row < home_row)
            begin = tl.load(start + row // slab, mask=away, other=-1)
            element = begin + (row % slab).to(tl.int64) * WIDTH
            address = tl.where(begin < 0, 0, rows.to(tl.int64) + element * BYTES)
        if HAS_HOME:
            own = row - home_row
            at_home = (own >= 0) & (own < home_rows)
            address = tl.where(at_home, home.to(tl.int64) + own.to(tl.int64) * (WIDTH * BYTES), address)
        tl.store(out + pair, address, mask=live)


@quick
@triton.jit
def _tile_table(  # type: ignore[no-untyped-def]
    offsets, tiles, starts, ranked, slots, entries, BM: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    ENTRIES: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    # Groups in the order in which tiles are listed: by part, then by slot; `group` is where their pairs lie.
    listed = tl.arange(0, GROUPS)
    group = listed % slots * PARTS + listed // slots
    there = listed < slots * PARTS
    end = tl.load(offsets + group, mask=there, other=0)
    number = end - tl.load(offsets + group - 1, mask=there & (group + BEFORE > 0), other=0)
    heights = tl.cdiv(tl.where(there, number, 0), BM)
    past = tl.cumsum(heights, 0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    own = tl.sum(((past[None, :] <= entry[:, None]) & there[None, :]).to(tl.int32), 1)
    live = (own < slots * PARTS) & (entry < entries)
    before = tl.sum(tl.where(listed[None, :] < own[:, None], heights[None, :], 0), 1)
    slot = own % slots
    group = slot * PARTS + own // slots
    begin = tl.load(offsets + group - 1, mask=live & (group + BEFORE > 0), other=0)
    at = tiles + (1 + entry) * 4
    tl.store(at, slot, mask=live)
    tl.store(at + 1, begin + (entry - before) * BM, mask=live)
    tl.store(at + 2, tl.load(offsets + group, mask=live, other=0), mask=live)
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum(heights, 0))
        tl.store(starts + listed // slots, past - heights, mask=there & (listed % slots == 0))
        tl.store(starts + PARTS, tl.sum(heights, 0))
        # Of slots, all parts together.
        is_slot = listed < slots
        last = tl.load(offsets + listed * PARTS + PARTS - 1, mask=is_slot, other=0)
        size = last - tl.load(offsets + listed * PARTS - 1, mask=is_slot & (listed + BEFORE > 0), other=0)
        # Keys differ, and sort by size, then by slot; what is only there to fill up has the smallest.
        key = tl.where(is_slot, size.to(tl.int64) * GROUPS + (GROUPS - 1 - listed), -1 - listed.to(tl.int64))
        key = tl.sort(key, descending=True)
        by_size = (GROUPS - 1 - key % GROUPS).to(tl.int32)
        place = ranked + listed * 4
        before_it = offsets + by_size * PARTS - 1
        tl.store(place, by_size, mask=is_slot)
        tl.store(place + 1, tl.load(before_it, mask=is_slot & (by_size + BEFORE > 0), other=0), mask=is_slot)
        tl.store(place + 2, tl.load(before_it + PARTS, mask=is_slot, other=0), mask=is_slot)


@quick
@triton.jit
def _sum_shares(  # type: ignore[no-untyped-def]
    shares, position, dy, bias, slot, out, entries, pairs, NUMBER: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(position + entry, mask=entry < entries, other=-1)
    present = pair >= 0
    total = tl.zeros((ROWS,), tl.float32)
    for share in tl.static_range(NUMBER):
        total += tl.load(shares + tl.full((), share, tl.int64) * pairs + pair, mask=present, other=0.0)
    if HAS_BIAS:
        own = tl.load(slot + entry, mask=present, other=0).to(tl.int64)
        product = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = present[:, None] & (column < WIDTH)[None, :]
            grad = tl.load(dy + pair.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
            add = tl.load(bias + own[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
            product += grad.to(tl.float32) * add.to(tl.float32)
        total += tl.sum(product, 1)
    tl.store(out + entry, total, mask=entry < entries)


class RowAddresses(NamedTuple):
    """The address of each pair's row. An address does not keep memory alive: the caller must hold this object until the
    kernel that reads the addresses is launched.

    Attributes:
        address_P: (P,) int64, multiples of 16; 0: there is no such row, because the arena was too small.
        sources: the tensors that the addresses point into.
    """

    address_P: torch.Tensor
    sources: tuple[torch.Tensor, ...]


def row_addresses(rows: HiddenStates, order_P: torch.Tensor, offsets_S: torch.Tensor, columns: int) -> RowAddresses:
    """The addresses of rows whose width is a multiple of 16 bytes. Nothing is written past the count."""
    data = aligned(rows.data)
    home = None if rows.home is None else aligned(rows.home)
    address_P = torch.empty(order_P.shape[0], dtype=torch.int64, device=order_P.device)
    if address_P.numel() and offsets_S.numel():
        _row_addresses[programs(address_P.unsqueeze(1), 256, 1)](
            data, data if rows.start is None else rows.start, data if home is None else home, order_P, offsets_S,
            address_P, offsets_S.shape[0], rows.slab or 2**31 - 1, rows.home_row, 0 if home is None else home.shape[0],
            J=columns, WIDTH=rows.width, BYTES=data.element_size(), HAS_START=rows.start is not None,
            HAS_HOME=home is not None, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return RowAddresses(address_P, (data,) if home is None else (data, home))


def tile_table(
    offsets_G: torch.Tensor, num_pairs: int, tile_rows: int, parts: int = 1, before: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How the pairs are cut into tiles of one slot each, and the slots by size. Of rows that come in parts no tile has
    rows of two, and tiles are listed by part.

    Args:
        offsets_G: (S * parts,) where the pairs of each part of each slot end.
        before: a number before these says where the first ones begin; else that is 0.

    Returns:
        tiles_M4: (1 + as many as there can be, 4) int32. The first entry of row 0 is how many tiles there are; row
            1 + i is (slot, first pair, end of the slot's pairs, nothing) of tile i.
        ranked_S4: (S, 4) int32, those with most pairs first: (slot, its first pair, their end, nothing).
        starts_N: (parts + 1,) int32, the first tile of each part, and how many there are.

    Example: offsets [3, 3, 8], tiles of 4  ->  tiles [3], [0, 0, 3], [2, 3, 8], [2, 7, 8] and ranked [2, 3, 8],
    [0, 0, 3], [1, 3, 3]. 2 parts, offsets [2, 3, 3, 8] (slot 0: 2 and 1 pairs, slot 1: 0 and 5)  ->  tiles [4],
    [0, 0, 2], [0, 2, 3], [1, 3, 8], [1, 7, 8], starts [0, 1, 4] and ranked [1, 3, 8], [0, 0, 3]
    """
    groups, device = offsets_G.shape[0], offsets_G.device
    slots = groups // parts
    entries = cdiv(num_pairs, tile_rows) + groups
    tiles_M4 = torch.empty(1 + entries, 4, dtype=torch.int32, device=device)
    ranked_S4 = torch.empty(slots, 4, dtype=torch.int32, device=device)
    starts_N = torch.empty(parts + 1, dtype=torch.int32, device=device)
    padded = max(2, power_of_2(groups))
    each = max(1, 8192 // padded)
    _tile_table[(cdiv(entries, each),)](
        offsets_G, tiles_M4, starts_N, ranked_S4, slots, entries, BM=tile_rows, PARTS=parts, GROUPS=padded,
        ENTRIES=each, BEFORE=before, num_warps=4,
    )  # fmt: skip
    return tiles_M4, ranked_S4, starts_N


def sum_shares(
    share_NP: torch.Tensor,
    position_RJ: torch.Tensor,
    slot_RJ: torch.Tensor,
    dy_PH: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
) -> torch.Tensor:
    """(R, J) float32: of each pair the sum of its shares, in order, + <dy, bias>; zero where there is no pair."""
    out_RJ = torch.empty(position_RJ.shape, dtype=torch.float32, device=position_RJ.device)
    width = 1 if dy_PH is None else dy_PH.shape[1]
    rows, block = (256, 1) if bias_SH is None else (8, min(256, power_of_2(width)))
    if out_RJ.numel():
        _sum_shares[(cdiv(out_RJ.numel(), rows),)](
            share_NP, position_RJ, share_NP if dy_PH is None else dy_PH,
            share_NP if bias_SH is None else bias_SH.contiguous(), slot_RJ, out_RJ, out_RJ.numel(), share_NP.shape[1],
            NUMBER=share_NP.shape[0], WIDTH=width, HAS_BIAS=bias_SH is not None, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_RJ


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and beginning at a multiple of 16 bytes, as all tensors do that are not views into others."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
