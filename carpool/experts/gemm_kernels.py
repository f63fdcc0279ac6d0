"""Grouped products with what surrounds them fused in, for Hopper: the fused side of up, down, dact and dx.

    _up       x where it lies @ up (+ bias)  ->  h, to where it is kept, and a = act(h)
    _plain    a @ down, dh @ up^T            ->  one row per pair, which `sum_pairs` adds up
    _dact     dy where it lies @ down^T      ->  dh, weight * a, and shares of <dA, a>; dA stays in registers

Rows of pairs that need no copy: `pair_kernels.row_addresses` says where the row of each pair begins (in the transport's
buffer, in the arena, among a rank's own tokens), once for all tiles, and a tile loads its 128 addresses, then pieces of
16 bytes from there into shared memory (cp.async). Matrices, and rows that lie in order, come by tensor maps (TMA).

A tile is 128 pairs of one expert x 256 columns, computed by 8 warps in steps of 64. Which tiles there are only the
device knows: `pair_kernels.tile_table` lists them once, for all stages of forward and backward. A persistent grid walks

    bands of 16 tiles of pairs, in a band column by column, in a column tile by tile

so that programs that run together read the same columns of the same expert and the same rows, and L2 serves most of it.
(A tile of 128 x 256 does 43 multiply-adds for each byte that it reads, one of 128 x 128 only 32, and nothing is shared
between multiprocessors: L2 is the limit to watch. A larger tile does not fit into the registers of 8 warps.)

    example   pairs of slots 0, 1, 2: 3, 0, 5; tiles of 4 rows; N = 2 tiles of columns; bands of 2
    table     (slot 0, pairs 0-2), (slot 2, pairs 3-6), (slot 2, pair 7)
    order     (tile 0, column 0) (1, 0) (0, 1) (1, 1) | (2, 0) (2, 1)

Gate and up of the same columns are one product of 256 columns: a block of the matrix seen as (S, 2, F, H), or, if they
alternate, 256 columns as they lie. The accumulator is then parted in registers. Accumulators are float32; h is rounded
before the activation is applied to it, so that the backward, which has only h, finds the same a. dA is not rounded.

The epilogue of _dact goes over its tile piece by piece (32 columns; 16 of gate and up each where they alternate): all
at once spilled 1.7 KB per thread. Compiled for sm_90 nothing spills but a few words for activations without a gate.
Two accumulators instead of one of 256 columns let the assembler give up overlapping products in flattened loops.

Rows that come in parts (`carpool.schedule.tiles`) are read while later parts are under way: _up and _dact walk the
tiles of one part after the other, and before each part every program waits until it is there. The waits stand between
loops of tiles, for in a flattened loop the next tile's rows are asked for before this one's are done. Parts continue
each other's turns, so no program is idle while a part ends. _plain takes the tiles of one part.

Steps past a matrix's edge read zeros; rows past an expert's last are read where they are harmless and never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from carpool.experts.activation_kernels import _slopes, _value, constants
from carpool.experts.base import Activation
from carpool.experts.pair_kernels import aligned
from carpool.memory.arena import Rows
from carpool.processors import processors
from carpool.quick import cdiv, power_of_2, quick
from carpool.transport.nvlink.buffers import MAX_CTAS, Awaited
from carpool.transport.nvlink.signals import SPIN, wait_part

TILE_ROWS = 128
BAND = 16


@triton.jit
def _place(tiles, tile, heights, COLUMNS: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile: its expert, pairs and which of them are the expert's, and its column."""
    band = tile // (BAND * COLUMNS)
    height = tl.minimum(heights - band * BAND, BAND)
    within = tile - band * (BAND * COLUMNS)
    entry = tiles + (1 + band * BAND + within % height) * 4
    first = tl.load(entry + 1)
    pair = first + tl.arange(0, BM)
    return tl.load(entry), first, pair, pair < tl.load(entry + 2), within // height


@triton.jit
def _of_part(starts, part, before):  # type: ignore[no-untyped-def]
    """Of a part: its first tile of pairs, how many there are, and this program's first, where `before` tiles have been
    dealt out in turn."""
    programs = tl.num_programs(0)
    first = tl.load(starts + part)
    mine = (tl.program_id(0) + programs - before % programs) % programs
    return first, tl.load(starts + part + 1) - first, mine


@triton.jit
def _load_b(weight, expert, n, k, BN: tl.constexpr, BK: tl.constexpr, K_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BK, BN) of an expert's matrix, which lies as (K, N) if K_FIRST, else as (N, K). Zero past its edges."""
    if K_FIRST:
        return weight.load([expert, k, n]).reshape(BK, BN)
    else:
        return weight.load([expert, n, k]).reshape(BN, BK).T


@triton.jit
def _load_rows(address, k, K: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k to k + BK of the rows at these addresses; zero where the address is 0, and past K."""
    # Made into pointers here, after adding k, so that the compiler finds the alignment beside the load that needs it.
    row = tl.multiple_of((address + k * (DTYPE.primitive_bitwidth // 8)).to(tl.pointer_type(DTYPE)), 16)
    column = tl.arange(0, BK)
    mask = (address != 0)[:, None]
    if K % BK != 0:
        mask = mask & (k + column < K)[None, :]
    return tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and the right half of the columns; no data moves between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _up_tiles(  # type: ignore[no-untyped-def]
    address, weight, bias, h, room, a, tiles, heights, mine, H: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, WANTS_H: tl.constexpr, WANTS_A: tl.constexpr,
    K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """All tiles of the table, or those of a part; this program's first is `mine`. Returns how many there are."""
    DTYPE: tl.constexpr = a.dtype.element_ty
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    # Columns of h in one product: of the gate (and as many of up), or of all that there is.
    BC: tl.constexpr = BN // 2 if HALVES else BN
    C: tl.constexpr = F if HALVES else WIDTH
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    for tile in tl.range(mine, heights * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        expert, _, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        row = tl.load(address + pair, mask=live, other=0)
        if HALVES and K_FIRST:
            # Two products: one block of both would not go from memory to the tensor cores as it lies.
            gate = tl.zeros((BM, BC), tl.float32)
            up = gate
            for k in range(0, H, BK):
                x = _load_rows(row, k, H, BK, DTYPE)
                gate = tl.dot(x, weight.load([expert, k, 0, n * BC]).reshape(BK, BC), gate)
                up = tl.dot(x, weight.load([expert, k, 1, n * BC]).reshape(BK, BC), up)
        else:
            total = tl.zeros((BM, BN), tl.float32)
            for k in range(0, H, BK):
                x = _load_rows(row, k, H, BK, DTYPE)
                if HALVES:
                    both = weight.load([expert, 0, n * BC, k]).reshape(BN, BK).T
                    total = tl.dot(x, both, total)
                else:
                    total = tl.dot(x, _load_b(weight, expert, n * BC, k, BC, BK, K_FIRST), total)
            gate = total
            up = total
            if HALVES:
                gate, up = _halves(total, BM, BN)
        column = n * BC + tl.arange(0, BC)
        mask = live[:, None] & (column < C)[None, :]
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        if HAS_BIAS:
            at_bias = bias + expert.to(tl.int64) * WIDTH + column
            gate += tl.load(at_bias, mask=column < C, other=0.0).to(tl.float32)[None, :]
            if HALVES:
                up += tl.load(at_bias + F, mask=column < C, other=0.0).to(tl.float32)[None, :]
        # The activation is of what is kept, so that the backward finds the same.
        gate16, up16 = gate.to(DTYPE), up.to(DTYPE)
        if WANTS_H:
            kept = mask & (pair < room)[:, None]
            tl.store(h + at, gate16, mask=kept)
            if HALVES:
                tl.store(h + at + F, up16, mask=kept)
        if WANTS_A:
            gate, up = gate16.to(tl.float32), up16.to(tl.float32)
            inner = column
            if INTERLEAVED:
                gate, up = tl.split(tl.reshape(gate, (BM, BC // 2, 2)))
                inner = n * (BC // 2) + tl.arange(0, BC // 2)
            value = _value(gate, up, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            tl.store(
                a + pair.to(tl.int64)[:, None] * F + inner[None, :], value.to(DTYPE),
                mask=live[:, None] & (inner < F)[None, :],
            )  # fmt: skip
    return heights * COLUMNS


@quick
@triton.jit(do_not_specialize=["verb", "sources", "each", "parts"])
def _up(  # type: ignore[no-untyped-def]
    address, weight, bias, h, start, a, tiles, starts, flags, epochs, status, host_status, timeout, verb,
    sources, each, parts, H: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_START: tl.constexpr, WANTS_H: tl.constexpr,
    WANTS_A: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BAND: tl.constexpr, FLATTEN: tl.constexpr, AWAITED: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    SPIN: tl.constexpr,
):  # fmt: skip
    room = 0x7FFFFFFF
    if HAS_START:
        # Without room in the arena nothing is kept, but what the layer computes is right.
        begin = tl.load(start)
        h += tl.multiple_of(begin, 16)
        room = tl.where(begin < 0, 0, room)
    if not AWAITED:
        _up_tiles(
            address, weight, bias, h, room, a, tiles, tl.load(tiles), tl.program_id(0), H, F, WIDTH, NAME, GATED,
            INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS, WANTS_H, WANTS_A, K_FIRST, BM, BN, BK, BAND, FLATTEN,
        )  # fmt: skip
    else:
        part, before = 0, 0
        # Not `for`: the compiler flattens the loop of tiles only if no such loop is around it.
        while part < parts:
            wait_part(flags, epochs, part, timeout, status, host_status, verb, sources, each, STRIDE, PAD, SPIN)
            first, heights, mine = _of_part(starts, part, before)
            before += _up_tiles(
                address, weight, bias, h, room, a, tiles + first * 4, heights, mine, H, F, WIDTH, NAME, GATED,
                INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS, WANTS_H, WANTS_A, K_FIRST, BM, BN, BK, BAND,
                FLATTEN,
            )  # fmt: skip
            part += 1


@quick
@triton.jit(do_not_specialize=["part"])
def _plain(  # type: ignore[no-untyped-def]
    rows, weight, out, tiles, starts, part, K: tl.constexpr, N: tl.constexpr, K_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr,
    PARTED: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    if PARTED:
        first, heights, _ = _of_part(starts, part, 0)
        tiles += first * 4
    else:
        heights = tl.load(tiles)
    for tile in tl.range(tl.program_id(0), heights * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        expert, first, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            # Rows past the expert's are other experts', or garbage; what they give is not stored.
            total = tl.dot(rows.load([first, k]), _load_b(weight, expert, n * BN, k, BN, BK, K_FIRST), total)
        column = n * BN + tl.arange(0, BN)
        at = pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live[:, None] & (column < N)[None, :])


@triton.jit
def _dact_piece(  # type: ignore[no-untyped-def]
    grad, first, pair, live, factor, h, dh, scaled, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, WANTS_SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The activation's backward for columns first to first + BN of dA; returns their share of <dA, a>."""
    DTYPE: tl.constexpr = dh.dtype.element_ty
    row = pair.to(tl.int64)[:, None]
    column = first + tl.arange(0, BN)
    mask = live[:, None] & (column < F)[None, :]
    if INTERLEAVED:
        twice = first * 2 + tl.arange(0, 2 * BN)
        mask_twice = live[:, None] & (twice < WIDTH)[None, :]
        at_twice = row * WIDTH + twice[None, :]
        both = tl.load(h + at_twice, mask=mask_twice, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BM, BN, 2)))
    else:
        at = row * WIDTH + column[None, :]
        gate = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(h + at + F, mask=mask, other=0.0).to(tl.float32)
    value, dgate, dup = _slopes(gate, up, grad * factor, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dgate, dup), (BM, 2 * BN))
        tl.store(dh + at_twice, both.to(DTYPE), mask=mask_twice)
    else:
        tl.store(dh + at, dgate.to(DTYPE), mask=mask)
        if GATED:
            tl.store(dh + at + F, dup.to(DTYPE), mask=mask)
    if WANTS_SCALED:
        tl.store(scaled + row * F + column[None, :], (value * factor).to(DTYPE), mask=mask)
    return tl.sum(grad * value, 1)


@triton.jit
def _dact_pieces(  # type: ignore[no-untyped-def]
    grad, first, pair, live, factor, h, dh, scaled, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, WANTS_SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Piece by piece, for h and what is made of it do not fit into registers beside all of dA."""
    if BN <= PIECE:
        return _dact_piece(
            grad, first, pair, live, factor, h, dh, scaled, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT,
            ALPHA, SHIFT, WANTS_SCALED, BM, BN,
        )  # fmt: skip
    else:
        left, right = _halves(grad, BM, BN)
        total = _dact_pieces(
            left, first, pair, live, factor, h, dh, scaled, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT,
            ALPHA, SHIFT, WANTS_SCALED, BM, BN // 2, PIECE,
        )  # fmt: skip
        return total + _dact_pieces(
            right, first + BN // 2, pair, live, factor, h, dh, scaled, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT,
            LIMIT, ALPHA, SHIFT, WANTS_SCALED, BM, BN // 2, PIECE,
        )  # fmt: skip


@triton.jit
def _dact_tiles(  # type: ignore[no-untyped-def]
    address, weight, factors, order, h, dh, scaled, partial, tiles, heights, mine, pairs, H: tl.constexpr,
    F: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    WANTS_SCALED: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """As `_up_tiles`."""
    DTYPE: tl.constexpr = dh.dtype.element_ty
    COLUMNS: tl.constexpr = (F + BN - 1) // BN
    for tile in tl.range(mine, heights * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        expert, _, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        row = tl.load(address + pair, mask=live, other=0)
        grad = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            dy = _load_rows(row, k, H, BK, DTYPE)
            grad = tl.dot(dy, _load_b(weight, expert, n * BN, k, BN, BK, K_FIRST), grad)
        factor = tl.load(factors + tl.load(order + pair, mask=live, other=0), mask=live, other=0.0)[:, None]
        total = _dact_pieces(
            grad, n * BN, pair, live, factor, h, dh, scaled, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT,
            ALPHA, SHIFT, WANTS_SCALED, BM, BN, PIECE,
        )  # fmt: skip
        tl.store(partial + n.to(tl.int64) * pairs + pair, total, mask=live)
    return heights * COLUMNS


@quick
@triton.jit(do_not_specialize=["pairs", "verb", "sources", "each", "parts"])
def _dact(  # type: ignore[no-untyped-def]
    address, weight, factors, order, h, start, dh, scaled, partial, tiles, pairs, starts, flags, epochs, status,
    host_status, timeout, verb, sources, each, parts, H: tl.constexpr,
    F: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_START: tl.constexpr,
    WANTS_SCALED: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr, PIECE: tl.constexpr, AWAITED: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, SPIN: tl.constexpr,
):  # fmt: skip
    there = 1
    if HAS_START:
        begin = tl.load(start)
        h += tl.multiple_of(begin, 16)
        # Without room in the arena there is no h, and nothing to be made of it.
        there = tl.where(begin < 0, 0, 1)
    if not AWAITED:
        _dact_tiles(
            address, weight, factors, order, h, dh, scaled, partial, tiles, tl.load(tiles) * there, tl.program_id(0),
            pairs, H, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, WANTS_SCALED, K_FIRST, BM, BN,
            BK, BAND, FLATTEN, PIECE,
        )  # fmt: skip
    else:
        part, before = 0, 0
        # Not `for`: the compiler flattens the loop of tiles only if no such loop is around it.
        while part < parts:
            wait_part(flags, epochs, part, timeout, status, host_status, verb, sources, each, STRIDE, PAD, SPIN)
            first, heights, mine = _of_part(starts, part, before)
            before += _dact_tiles(
                address, weight, factors, order, h, dh, scaled, partial, tiles + first * 4, heights * there, mine,
                pairs, H, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, WANTS_SCALED, K_FIRST, BM,
                BN, BK, BAND, FLATTEN, PIECE,
            )  # fmt: skip
            part += 1


@dataclass(frozen=True)
class Tiling:
    """How the products are cut: tiles of TILE_ROWS pairs x `columns`, BK deep.

    Attributes:
        columns: of a tile, gate and up counted.
        warps, stages: of a program; how many steps are in shared memory.
        programs: on one multiprocessor.
        flatten: the loads of the next tile start before the results of this one are written.
    """

    columns: int
    warps: int
    stages: int
    programs: int = 1
    flatten: bool = False
    depth: int = 64


TILINGS = {
    "wide": Tiling(256, 8, 4),
    "flat": Tiling(256, 8, 4, flatten=True),
    "square": Tiling(128, 4, 3, programs=2),
}


def up(
    address_P: torch.Tensor,
    up_weight: torch.Tensor,
    transposed: bool,
    bias_SF: torch.Tensor | None,
    activation: Activation,
    h: Rows | None,
    tiles_M4: torch.Tensor,
    wants_a: bool,
    tiling: Tiling,
    parts: Parts | None = None,
) -> torch.Tensor:
    """a_PF = activation(rows @ up + bias), and the pre-activation into `h`, if that is given.

    Args:
        address_P: of the pairs' rows (`pair_kernels.row_addresses`).
        up_weight: (S, F1, H), or (S, H, F1) if `transposed`.
        wants_a: if not, an empty tensor is returned.
        parts: the rows are under way, and each part is waited for before it is read.
    """
    slots, hidden, width = up_weight.shape[0], *_in_out(up_weight, transposed)
    inner = width // 2 if activation.gated else width
    a_PF = up_weight.new_empty(address_P.shape[0] if wants_a else 0, inner)
    columns, bk, flatten = tiling.columns, tiling.depth, tiling.flatten
    if activation.gated and not activation.interleaved:
        # Blocks of gate and of up together.
        half = columns // 2
        if transposed:
            flatten = False  # two accumulators, see the top
            weight = _describe(up_weight, (slots, hidden, 2, inner), (1, bk, 1, half))
        else:
            weight = _describe(up_weight, (slots, 2, inner, hidden), (1, 2, half, bk))
    else:
        weight = _describe(up_weight, up_weight.shape, (1, bk, columns) if transposed else (1, columns, bk))
    data = a_PF if h is None else h.data
    start = None if h is None else h.start
    _up[_grid(a_PF, tiling)](
        address_P, weight, a_PF if bias_SF is None else bias_SF.contiguous(), data,
        tiles_M4 if start is None else start, a_PF, tiles_M4, *_waits(parts, tiles_M4), H=hidden, F=inner, WIDTH=width,
        **constants(activation), HAS_BIAS=bias_SF is not None, HAS_START=start is not None, WANTS_H=h is not None,
        WANTS_A=wants_a, K_FIRST=transposed, BM=TILE_ROWS, BN=columns, BK=bk, BAND=BAND, FLATTEN=flatten,
        **_waits_for(parts), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return a_PF


def product(
    rows_PK: torch.Tensor,
    weight: torch.Tensor,
    k_first: bool,
    tiles_M4: torch.Tensor,
    tiling: Tiling,
    starts_N: torch.Tensor | None = None,
    part: int = 0,
    out_PN: torch.Tensor | None = None,
) -> torch.Tensor:
    """(P, N): every row a product with its expert's matrix, (S, K, N) if `k_first`, else (S, N, K).

    Args:
        starts_N, part: only this part, of `pair_kernels.part_table`.
        out_PN: where to write.
    """
    width, columns = _in_out(weight, k_first)
    if out_PN is None:
        out_PN = rows_PK.new_empty(rows_PK.shape[0], columns)
    bn, bk = tiling.columns, tiling.depth
    _plain[_grid(out_PN, tiling)](
        _describe(rows_PK, rows_PK.shape, (TILE_ROWS, bk)),
        _describe(weight, weight.shape, (1, bk, bn) if k_first else (1, bn, bk)), out_PN, tiles_M4,
        tiles_M4 if starts_N is None else starts_N, part, K=width, N=columns, K_FIRST=k_first, BM=TILE_ROWS, BN=bn,
        BK=bk, BAND=BAND, FLATTEN=tiling.flatten, PARTED=starts_N is not None, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    return out_PN


def down_backward(
    address_P: torch.Tensor,
    down_weight: torch.Tensor,
    transposed: bool,
    activation: Activation,
    h: Rows,
    weight_RJ: torch.Tensor,
    order_P: torch.Tensor,
    tiles_M4: torch.Tensor,
    wants_scaled: bool,
    tiling: Tiling,
    parts: Parts | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With dA = rows of dy @ down^T, which is never written: (dh_PF1, weight * a, parts_NP), where the sum of parts_NP
    over the blocks of columns is <dA, a>. `weight * a` is empty unless wanted.

    Args:
        down_weight: (S, H, F), or (S, F, H) if `transposed`.
        parts: as in `up`.
    """
    inner, hidden = _in_out(down_weight, transposed)
    pairs, bn, bk = address_P.shape[0], tiling.columns, tiling.depth
    dh_PF1 = down_weight.new_empty(pairs, h.width)
    scaled_PF = down_weight.new_empty(pairs if wants_scaled else 0, inner)
    parts_NP = torch.empty(cdiv(inner, bn), pairs, dtype=torch.float32, device=address_P.device)
    _dact[_grid(dh_PF1, tiling)](
        address_P, _describe(down_weight, down_weight.shape, (1, bn, bk) if transposed else (1, bk, bn)), weight_RJ,
        order_P, h.data, tiles_M4 if h.start is None else h.start, dh_PF1, scaled_PF, parts_NP, tiles_M4, pairs,
        *_waits(parts, tiles_M4), H=hidden, F=inner, WIDTH=h.width, **constants(activation),
        HAS_START=h.start is not None, WANTS_SCALED=wants_scaled, K_FIRST=not transposed, BM=TILE_ROWS, BN=bn, BK=bk,
        BAND=BAND, FLATTEN=tiling.flatten, PIECE=16 if activation.interleaved else 32, **_waits_for(parts),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return dh_PF1, scaled_PF, parts_NP


class Parts(NamedTuple):
    """Rows that are under way in parts.

    Attributes:
        number: of parts.
        starts_N: their tiles (`pair_kernels.part_table`).
        awaited: what to wait with.
    """

    number: int
    starts_N: torch.Tensor
    awaited: Awaited


def _waits(parts: Parts | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """What a kernel that waits is given."""
    return (unused,) * 5 + (0,) * 5 if parts is None else (parts.starts_N, *parts.awaited, parts.number)


def _waits_for(parts: Parts | None) -> dict[str, int]:
    """What a kernel that waits is compiled for: the same for all numbers of parts and programs."""
    pad = 1 if parts is None else power_of_2(parts.awaited.sources) * MAX_CTAS
    return {"AWAITED": parts is not None, "STRIDE": MAX_CTAS, "PAD": pad, "SPIN": SPIN}


def _in_out(weight: torch.Tensor, in_first: bool) -> tuple[int, int]:
    """Widths of what an expert's matrix reads and gives: it lies as (S, in, out) if `in_first`, else (S, out, in)."""
    return (weight.shape[1], weight.shape[2]) if in_first else (weight.shape[2], weight.shape[1])


def _describe(tensor: torch.Tensor, shape: Sequence[int], block: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(aligned(tensor).view(shape), list(block))


def _grid(out: torch.Tensor, tiling: Tiling) -> tuple[int]:
    if not out.is_cuda:
        return (2,)
    return (processors(out.device) * tiling.programs,)
