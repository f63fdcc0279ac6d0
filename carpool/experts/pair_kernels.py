"""The CUDA kernels of `carpool.experts.pairs`: tokens to pairs, pairs to tokens, pairs to slots.

The number of pairs is in device memory, in the last entry of `offsets_S`, and tensors of pairs have the length of the
host's bound, which is usually several times larger. So the kernels are persistent: a grid of a few programs per
multiprocessor, independent of the bound, and each program takes tiles

    tile = program, program + programs, ...        while  tile < tiles of actual pairs

Nothing past the count is read or written. A tile is ROWS x BLOCK elements, 16 to 32 per thread, so that enough bytes
are in flight with 8 or more programs on a multiprocessor; the width of a row is a compile-time constant, so that rows
of a multiple of 8 elements are copied in 16-byte units without an alignment hint.

    gather_rows    copies the hidden state of each pair once: P x H in, P x H out
    sum_pairs      one program per tile of *output* rows adds their J columns in order, so there are no atomics, and
                   an empty column costs no memory access
    slot_sums      the pairs of a slot are contiguous: 16 programs each add every 16th tile of it, and a second kernel
                   adds their sums in order. Even a single slot with all pairs has 16 x (columns / 128) programs

table_kernels.py has the kernels before and after the fused products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.kernels.device import processors
from carpool.kernels.quick import cdiv, power_of_2, quick

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


def gather_rows(
    rows: HiddenStates, order_P: torch.Tensor, offsets_S: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """(P, width): for each pair the hidden state of its token, `order_P // columns`. Rows past the count are not
    written."""
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

    float64 adds in float64, other dtypes in float32, rounded once. Rows without pairs become zero, or with
    `all_rows=False` are not written.
    """
    if out_RH.numel() == 0:
        return
    width = out_RH.shape[1]
    tile, block = tiling(width, 1024)  # J loads of each element are in flight at once
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
    """`sum_pairs` for the tokens of one part (`carpool.activations.arrivals.Ready`); rows without pairs are not
    written."""
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
    """(S, width): for each slot the sum of its pairs, each times its weight if given; zero for a slot without pairs."""
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


def accumulator(values: torch.Tensor) -> tl.dtype:
    return tl.float64 if values.dtype == torch.float64 else tl.float32


def tiling(width: int, elements: int = 2048) -> tuple[int, int]:
    """(ROWS, BLOCK) of a tile: powers of two with a product of about `elements`, and the least columns past the width.

    Example: width 768 -> (8, 256): three full blocks. Width 37 -> (32, 64).
    """
    blocks = [b for b in (1024, 512, 256, 128) if b < 2 * width] or [power_of_2(width)]
    block = min(blocks, key=lambda b: (cdiv(width, b) * b, -b))
    return max(1, elements // block), block


def programs(out: torch.Tensor, tile: int, block: int, per_processor: int = 16) -> tuple[int]:
    """The grid for tiles of `out`: enough programs to fill the GPU, at most one per tile. In the interpreter on a CPU
    two, so that each takes several tiles."""
    tiles = cdiv(out.shape[0], tile) * cdiv(out.shape[1], block)
    if not out.is_cuda:
        return (min(tiles, 2),)
    return (min(tiles, processors(out.device) * per_processor),)
