"""The CUDA side of `carpool.experts.pairs`: rows to pairs, pairs to rows, pairs to slots.

How many pairs there are stands in device memory, in the last entry of `offsets_S`, and tensors of pairs are as long as
the bound that the host knows, several times longer as a rule. So the kernels are persistent: a grid of a few programs
per multiprocessor, whatever the bound, and each program takes tiles

    tile = program, program + programs, ...        while  tile < tiles of the pairs that are there

Nothing past the count is read or written. A tile is ROWS x BLOCK elements, 16 to 32 per thread, which is what it takes
to keep enough bytes under way with 8 or more programs on a multiprocessor; the width of a row is a compile-time
constant, so that rows of a multiple of 8 elements move in 16-byte pieces without the launcher promising it.

    gather_rows    moves each pair's row once: P x H in, P x H out
    sum_pairs      one program per tile of *output* rows walks their J columns in order, so there are no atomics, and
                   a column that is empty costs no memory access
    slot_sums      pairs of a slot lie together: 16 programs each add every 16th tile of it, and a second kernel adds
                   their sums in order. One slot that got everything is still 16 x (columns / 128) programs

Three small ones prepare and finish the fused products of gemm_kernels.py: `row_addresses` (where each pair's row
begins), `tile_table` (which tiles of pairs there are), `sum_parts` (gradients of weights from their shares).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from carpool.memory.arena import Rows
from carpool.processors import processors
from carpool.quick import cdiv, power_of_2, quick

SPLITS = 16


@quick
@triton.jit
def _gather_rows(  # type: ignore[no-untyped-def]
    rows, start, home, order, offsets, out, slots, slab, home_row, home_rows, J: tl.constexpr, WIDTH: tl.constexpr,
    HAS_START: tl.constexpr, HAS_HOME: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.load(offsets + slots - 1)
    chunks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS) * chunks, tl.num_programs(0)):
        pair = (tile // chunks) * ROWS + tl.arange(0, ROWS)
        column = (tile % chunks) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(order + pair, mask=pair < count, other=0) // J
        mask = (pair < count)[:, None] & (column < WIDTH)[None, :]
        element = row.to(tl.int64) * WIDTH
        away = pair < count
        if HAS_HOME:
            at_home = (row >= home_row) & (row < home_row + home_rows)
            away = away & (row < home_row)
        if HAS_START:
            begin = tl.load(start + row // slab, mask=away, other=-1)
            away = away & (begin >= 0)
            element = tl.multiple_of(begin, 16) + (row % slab).to(tl.int64) * WIDTH
        value = tl.load(rows + element[:, None] + column[None, :], mask=mask & away[:, None], other=0.0)
        if HAS_HOME:
            # A second load, of the rows that the first left out: one pointer into either tensor would hide alignment.
            own = (row - home_row).to(tl.int64) * WIDTH
            near = tl.load(home + own[:, None] + column[None, :], mask=mask & at_home[:, None], other=0.0)
            value = tl.where(at_home[:, None], near, value)
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_tile(  # type: ignore[no-untyped-def]
    values, position, weight, bias, slot, out, first, end, left, J: tl.constexpr, WIDTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ALL_ROWS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows first to first + ROWS, before `end`, and columns from `left`."""
    row = first + tl.arange(0, ROWS)
    column = left + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((ROWS, BLOCK), ACC)
    wanted = row < 0
    for j in tl.static_range(J):
        entry = row.to(tl.int64) * J + j
        pair = tl.load(position + entry, mask=row < end, other=-1)
        present = pair >= 0
        mask = present[:, None] & inside[None, :]
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(values + at, mask=mask, other=0.0).to(ACC)
        if HAS_BIAS:
            own = tl.load(slot + entry, mask=present, other=0).to(tl.int64)
            value += tl.load(bias + own[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(ACC)
        if HAS_WEIGHT:
            value *= tl.load(weight + entry, mask=present, other=0.0).to(ACC)[:, None]
        total += value
        wanted = wanted | present
    written = row < end
    if not ALL_ROWS:
        written = written & wanted
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=written[:, None] & inside[None, :])


@quick
@triton.jit
def _sum_pairs(  # type: ignore[no-untyped-def]
    values, position, weight, bias, slot, out, rows, J: tl.constexpr, WIDTH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALL_ROWS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * chunks, tl.num_programs(0)):
        _sum_tile(
            values, position, weight, bias, slot, out, tile // chunks * ROWS, rows, tile % chunks * BLOCK, J, WIDTH,
            HAS_WEIGHT, HAS_BIAS, ALL_ROWS, ACC, ROWS, BLOCK,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["part", "slab"])
def _sum_part(  # type: ignore[no-untyped-def]
    values, position, weight, bias, slot, out, begins, part, slab, slabs, J: tl.constexpr, WIDTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    programs = tl.num_programs(0)
    before = 0
    for number in range(slabs):
        begin = number * slab + tl.load(begins + part * slabs + number)
        end = number * slab + tl.load(begins + (part + 1) * slabs + number)
        tiles = tl.cdiv(end - begin, ROWS) * chunks
        # Slabs share the programs: the first of this one's tiles is for the one after the last of the slab before.
        for tile in range((tl.program_id(0) + programs - before % programs) % programs, tiles, programs):
            _sum_tile(
                values, position, weight, bias, slot, out, begin + tile // chunks * ROWS, end, tile % chunks * BLOCK,
                J, WIDTH, HAS_WEIGHT, HAS_BIAS, False, ACC, ROWS, BLOCK,
            )  # fmt: skip
        before += tiles


@quick
@triton.jit
def _slot_sums(  # type: ignore[no-untyped-def]
    values, weight, order, offsets, out, WIDTH: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, split = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets + slot - 1, mask=slot > 0, other=0)
    end = tl.load(offsets + slot)
    total = tl.zeros((ROWS, BLOCK), ACC)
    for first in range(begin + split * ROWS, end, tl.num_programs(1) * ROWS):
        pair = first + tl.arange(0, ROWS)
        mask = (pair < end)[:, None] & (column < WIDTH)[None, :]
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(values + at, mask=mask, other=0.0).to(ACC)
        if HAS_WEIGHT:
            entry = tl.load(order + pair, mask=pair < end, other=0)
            value *= tl.load(weight + entry, mask=pair < end, other=0.0).to(ACC)[:, None]
        total += value
    at = (split * tl.num_programs(0) + slot).to(tl.int64) * WIDTH + column
    tl.store(out + at, tl.sum(total, 0), mask=column < WIDTH)


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
    ENTRIES: tl.constexpr,
):  # fmt: skip
    # Groups in the order in which tiles are listed: by part, then by slot; `group` is where their pairs lie.
    listed = tl.arange(0, GROUPS)
    group = listed % slots * PARTS + listed // slots
    there = listed < slots * PARTS
    end = tl.load(offsets + group, mask=there, other=0)
    number = end - tl.load(offsets + group - 1, mask=there & (group > 0), other=0)
    heights = tl.cdiv(tl.where(there, number, 0), BM)
    past = tl.cumsum(heights, 0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    own = tl.sum(((past[None, :] <= entry[:, None]) & there[None, :]).to(tl.int32), 1)
    live = (own < slots * PARTS) & (entry < entries)
    before = tl.sum(tl.where(listed[None, :] < own[:, None], heights[None, :], 0), 1)
    slot = own % slots
    group = slot * PARTS + own // slots
    begin = tl.load(offsets + group - 1, mask=live & (group > 0), other=0)
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
        size = last - tl.load(offsets + listed * PARTS - 1, mask=is_slot & (listed > 0), other=0)
        # Keys differ, and sort by size, then by slot; what is only there to fill up has the smallest.
        key = tl.where(is_slot, size.to(tl.int64) * GROUPS + (GROUPS - 1 - listed), -1 - listed.to(tl.int64))
        key = tl.sort(key, descending=True)
        by_size = (GROUPS - 1 - key % GROUPS).to(tl.int32)
        place = ranked + listed * 4
        before_it = offsets + by_size * PARTS - 1
        tl.store(place, by_size, mask=is_slot)
        tl.store(place + 1, tl.load(before_it, mask=is_slot & (by_size > 0), other=0), mask=is_slot)
        tl.store(place + 2, tl.load(before_it + PARTS, mask=is_slot, other=0), mask=is_slot)


@quick
@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    parts, position, dy, bias, slot, out, entries, pairs, NUMBER: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(position + entry, mask=entry < entries, other=-1)
    present = pair >= 0
    total = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(NUMBER):
        total += tl.load(parts + tl.full((), part, tl.int64) * pairs + pair, mask=present, other=0.0)
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


def gather_rows(
    rows: Rows, order_P: torch.Tensor, offsets_S: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """(P, width): for each pair the row that it is of, `order_P // columns`. Rows past the count are not written."""
    data, width = rows.data.contiguous(), rows.width
    out_PH = torch.empty(order_P.shape[0], width, dtype=dtype, device=order_P.device)
    if out_PH.numel() and offsets_S.numel():
        tile, block = tiling(width)
        home = rows.home
        _gather_rows[programs(out_PH, tile, block)](
            data, data if rows.start is None else rows.start, data if home is None else home.contiguous(), order_P,
            offsets_S, out_PH, offsets_S.shape[0], rows.slab or 2**31 - 1, rows.home_row,
            0 if home is None else home.shape[0], J=columns, WIDTH=width, HAS_START=rows.start is not None,
            HAS_HOME=home is not None, ROWS=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_PH


def sum_pairs(
    values_PH: torch.Tensor,
    position_RJ: torch.Tensor,
    out_RH: torch.Tensor,
    weight_RJ: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
    slot_RJ: torch.Tensor,
    all_rows: bool,
) -> None:
    """out[r] = sum over j, in order, of weight[r, j] * (values[position[r, j]] + bias[slot[r, j]]).

    float64 adds in float64, all else in float32, rounded once. Rows without pairs become zero, or stay as they are if
    not `all_rows`.
    """
    if out_RH.numel() == 0:
        return
    width = out_RH.shape[1]
    tile, block = tiling(width, 1024)  # J values of each element are under way at once
    _sum_pairs[programs(out_RH, tile, block, per_processor=12)](
        values_PH, position_RJ, position_RJ if weight_RJ is None else weight_RJ,
        values_PH if bias_SH is None else bias_SH.contiguous(), slot_RJ, out_RH, out_RH.shape[0],
        J=position_RJ.shape[1], WIDTH=width, HAS_WEIGHT=weight_RJ is not None, HAS_BIAS=bias_SH is not None,
        ALL_ROWS=all_rows, ACC=accumulator(values_PH), ROWS=tile, BLOCK=block, num_warps=4,
    )  # fmt: skip


def sum_part(
    values_PH: torch.Tensor,
    position_RJ: torch.Tensor,
    out_RH: torch.Tensor,
    weight_RJ: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
    slot_RJ: torch.Tensor,
    begins_NW: torch.Tensor,
    part: int,
    slab: int,
) -> None:
    """`sum_pairs` of the rows of one part (`carpool.transport.base.Ready`); rows without pairs stay as they are."""
    width = out_RH.shape[1]
    tile, block = tiling(width, 1024)
    _sum_part[programs(out_RH, tile, block, per_processor=12)](
        values_PH, position_RJ, position_RJ if weight_RJ is None else weight_RJ,
        values_PH if bias_SH is None else bias_SH.contiguous(), slot_RJ, out_RH, begins_NW, part, slab,
        begins_NW.shape[1], J=position_RJ.shape[1], WIDTH=width, HAS_WEIGHT=weight_RJ is not None,
        HAS_BIAS=bias_SH is not None, ACC=accumulator(values_PH), ROWS=tile, BLOCK=block, num_warps=4,
    )  # fmt: skip


def slot_sums(
    values_PH: torch.Tensor, order_P: torch.Tensor, offsets_S: torch.Tensor, weight_RJ: torch.Tensor | None
) -> torch.Tensor:
    """(S, width): for each slot the sum of its pairs, each times its weight if there are any; zero for an idle slot."""
    slots, width = offsets_S.shape[0], values_PH.shape[1]
    if slots == 0 or values_PH.numel() == 0:
        return values_PH.new_zeros(slots, width)
    block = min(128, power_of_2(width))
    acc = torch.float64 if values_PH.dtype == torch.float64 else torch.float32
    parts_KSH = torch.empty(SPLITS, slots, width, dtype=acc, device=values_PH.device)
    _slot_sums[(slots, SPLITS, cdiv(width, block))](
        values_PH, values_PH if weight_RJ is None else weight_RJ, order_P, offsets_S, parts_KSH,
        WIDTH=width, HAS_WEIGHT=weight_RJ is not None, ACC=accumulator(values_PH), ROWS=32, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return parts_KSH.sum(0).to(values_PH.dtype)


class RowAddresses(NamedTuple):
    """Where the row of each pair begins. An address keeps no memory alive: whoever has a kernel read them holds this
    until that is launched.

    Attributes:
        address_P: (P,) int64, multiples of 16; 0: there is no such row, for the arena had no room.
        sources: what they point into.
    """

    address_P: torch.Tensor
    sources: tuple[torch.Tensor, ...]


def row_addresses(rows: Rows, order_P: torch.Tensor, offsets_S: torch.Tensor, columns: int) -> RowAddresses:
    """Of rows whose width is a multiple of 16 bytes. Nothing is written past the count."""
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


def tile_table(offsets_S: torch.Tensor, num_pairs: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How the pairs are cut into tiles of one slot each, and the slots by size.

    Returns:
        tiles_M4: (1 + as many as there can be, 4) int32. The first entry of row 0 is how many tiles there are; row
            1 + i is (slot, first pair, end of the slot's pairs, nothing) of tile i.
        ranked_S4: (S, 4) int32, those with most pairs first: (slot, its first pair, their end, nothing).

    Example: offsets [3, 3, 8], tiles of 4  ->  tiles [3], [0, 0, 3], [2, 3, 8], [2, 7, 8] and ranked [2, 3, 8],
    [0, 0, 3], [1, 3, 3]
    """
    return part_table(offsets_S, num_pairs, tile_rows, 1)[:2]


def part_table(
    offsets_G: torch.Tensor, num_pairs: int, tile_rows: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for rows that come in parts: no tile has rows of two, and tiles are listed by part.

    Args:
        offsets_G: (S * parts,) where the pairs of each part of each slot end.

    Returns:
        tiles_M4, ranked_S4: as above.
        starts_N: (parts + 1,) int32, the first tile of each part, and how many there are.

    Example: 2 parts, offsets [2, 3, 3, 8] (slot 0: 2 and 1 pairs, slot 1: 0 and 5)  ->  tiles [4], [0, 0, 2],
    [0, 2, 3], [1, 3, 8], [1, 7, 8], starts [0, 1, 4] and ranked [1, 3, 8], [0, 0, 3]
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
        ENTRIES=each, num_warps=4,
    )  # fmt: skip
    return tiles_M4, ranked_S4, starts_N


def sum_parts(
    parts_NP: torch.Tensor,
    position_RJ: torch.Tensor,
    slot_RJ: torch.Tensor,
    dy_PH: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
) -> torch.Tensor:
    """(R, J) float32: of each pair the sum of its parts, in order, + <dy, bias>; zero where there is no pair."""
    out_RJ = torch.empty(position_RJ.shape, dtype=torch.float32, device=position_RJ.device)
    width = 1 if dy_PH is None else dy_PH.shape[1]
    rows, block = (256, 1) if bias_SH is None else (8, min(256, power_of_2(width)))
    if out_RJ.numel():
        _sum_parts[(cdiv(out_RJ.numel(), rows),)](
            parts_NP, position_RJ, parts_NP if dy_PH is None else dy_PH,
            parts_NP if bias_SH is None else bias_SH.contiguous(), slot_RJ, out_RJ, out_RJ.numel(), parts_NP.shape[1],
            NUMBER=parts_NP.shape[0], WIDTH=width, HAS_BIAS=bias_SH is not None, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_RJ


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and beginning at a multiple of 16 bytes, as all tensors do that are not views into others."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def accumulator(values: torch.Tensor) -> tl.dtype:
    return tl.float64 if values.dtype == torch.float64 else tl.float32


def tiling(width: int, elements: int = 2048) -> tuple[int, int]:
    """(ROWS, BLOCK) of a tile: powers of two, about `elements` together, with as few columns past the width as can be.

    Example: width 768 -> (8, 256): three full blocks. Width 37 -> (32, 64).
    """
    blocks = [b for b in (1024, 512, 256, 128) if b < 2 * width] or [power_of_2(width)]
    block = min(blocks, key=lambda b: (cdiv(width, b) * b, -b))
    return max(1, elements // block), block


def programs(out: torch.Tensor, tile: int, block: int, per_processor: int = 16) -> tuple[int]:
    """A grid for tiles of `out`: enough programs to fill the GPU, and no more than there can be tiles. On the CPU,
    where Triton interprets, two, so that each takes several tiles."""
    tiles = cdiv(out.shape[0], tile) * cdiv(out.shape[1], block)
    if not out.is_cuda:
        return (min(tiles, 2),)
    return (min(tiles, processors(out.device) * per_processor),)
