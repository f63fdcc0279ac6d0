"""The fused up projection: gathers x by address, multiplies by up, and applies the activation.

    rows of x, by their addresses  @  up (+ bias)   ->   the saved pre-activation h,  a = act(h)

`gemm_tiles.py` says which tiles there are, and how rows that are under way are waited for. Gate and up of the same
columns are one product of 256 columns: a block of the matrix viewed as (S, 2, F, H), or, if they alternate, 256
consecutive columns. The accumulator is then split in registers:

    F 1024, gate and up apart      8 tiles of columns; tile 0 is columns 0-127 of the gate and columns 0-127 of up
    F 1024, gate and up in turn    8 tiles of columns; tile 0 is columns 0-255 of h, and 0-127 of a

Accumulators are float32; h is rounded before the activation is applied to it, so that the backward, which has only h,
finds the same a.

Sums begin with an adapter's share, if there is one (`adapter_kernels.py`); the loop of tiles is not flattened then.

A matrix stored (in, out) with gate and up apart takes two products, because a block of both has no layout that tensor
cores read directly. Two accumulators instead of one of 256 columns let the assembler give up overlapping products
in flattened loops, so that loop is not flattened.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.experts.activation_kernels import _value, constants
from carpool.experts.base import Activation
from carpool.experts.gemm.adapter_kernels import Share, share_arguments, stages
from carpool.experts.gemm.gemm_tiles import (
    BAND,
    TILE_ROWS,
    Parts,
    Tiling,
    _halves,
    _load_b,
    _load_columns,
    _load_rows,
    _of_part,
    _place,
    _share,
    describe,
    grid,
    has_maps,
    in_out,
    waits,
    waits_for,
)
from carpool.kernels.quick import quick
from carpool.kernels.signals import wait_part


@triton.jit
def _up_tiles(  # type: ignore[no-untyped-def]
    address, weight, bias, h, room, a, tiles, heights, mine, inner, factor, Q: tl.constexpr, BQ: tl.constexpr,
    Q_LAST: tl.constexpr, H: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, WANTS_H: tl.constexpr, WANTS_A: tl.constexpr,
    K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    FLATTEN: tl.constexpr, MAPS: tl.constexpr,
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
        if HALVES and K_FIRST and MAPS:
            # Two products: one block of both would not go from memory to the tensor cores as it lies.
            if Q:
                there = n * BC + tl.arange(0, BC)
                gate = _share(inner, factor, expert, pair, live, there, there < F, Q, WIDTH, Q_LAST, BQ)
                up = _share(inner, factor, expert, pair, live, there + F, there < F, Q, WIDTH, Q_LAST, BQ)
            else:
                gate = tl.zeros((BM, BC), tl.float32)
                up = gate
            for k in range(0, H, BK):
                x = _load_rows(row, k, H, BK, DTYPE)
                gate = tl.dot(x, weight.load([expert, k, 0, n * BC]).reshape(BK, BC), gate)
                up = tl.dot(x, weight.load([expert, k, 1, n * BC]).reshape(BK, BC), up)
        else:
            # Of halves, columns of the gate, then as many of up.
            one = tl.arange(0, BN)
            there = n * BC + (one % BC if HALVES else one)
            of_h = there + one // BC * F if HALVES else there
            if Q:
                total = _share(inner, factor, expert, pair, live, of_h, there < C, Q, WIDTH, Q_LAST, BQ)
            else:
                total = tl.zeros((BM, BN), tl.float32)
            for k in range(0, H, BK):
                x = _load_rows(row, k, H, BK, DTYPE)
                if not MAPS:
                    matrix = _load_columns(weight, expert, of_h, there < C, k, WIDTH, H, BK, K_FIRST)
                    total = tl.dot(x, matrix, total)
                elif HALVES:
                    both = weight.load([expert, 0, n * BC, k]).reshape(BN, BK).T
                    total = tl.dot(x, both, total)
                else:
                    total = tl.dot(x, _load_b(weight, expert, n * BC, k, C, H, BC, BK, K_FIRST, MAPS), total)
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
            of_a = column
            if INTERLEAVED:
                gate, up = tl.split(tl.reshape(gate, (BM, BC // 2, 2)))
                of_a = n * (BC // 2) + tl.arange(0, BC // 2)
            value = _value(gate, up, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            tl.store(
                a + pair.to(tl.int64)[:, None] * F + of_a[None, :], value.to(DTYPE),
                mask=live[:, None] & (of_a < F)[None, :],
            )  # fmt: skip
    return heights * COLUMNS


@quick
@triton.jit(do_not_specialize=["verb", "sources", "each", "parts"])
def _up(  # type: ignore[no-untyped-def]
    address, weight, bias, h, start, a, tiles, starts, flags, epochs, status, host_status, timeout, verb,
    sources, each, parts, inner, factor, Q: tl.constexpr, BQ: tl.constexpr, Q_LAST: tl.constexpr, H: tl.constexpr,
    F: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr, WANTS_H: tl.constexpr, WANTS_A: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr, AWAITED: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, SPIN: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    room = 0x7FFFFFFF
    if HAS_START:
        # Without room in the arena nothing is kept, but what the layer computes is right.
        begin = tl.load(start)
        h += tl.multiple_of(begin, 16)
        room = tl.where(begin < 0, 0, room)
    if not AWAITED:
        _up_tiles(
            address, weight, bias, h, room, a, tiles, tl.load(tiles), tl.program_id(0), inner, factor, Q, BQ, Q_LAST, H,
            F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS, WANTS_H, WANTS_A, K_FIRST, BM,
            BN, BK, BAND, FLATTEN, MAPS,
        )  # fmt: skip
    else:
        part, before = 0, 0
        # Not `for`: the compiler flattens the loop of tiles only if no such loop is around it.
        while part < parts:
            wait_part(flags, epochs, part, timeout, status, host_status, verb, sources, each, STRIDE, PAD, SPIN)
            first, heights, mine = _of_part(starts, part, before)
            before += _up_tiles(
                address, weight, bias, h, room, a, tiles + first * 4, heights, mine, inner, factor, 0, 0, False, H, F,
                WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS, WANTS_H, WANTS_A, K_FIRST,
                BM, BN, BK, BAND, FLATTEN, MAPS,
            )  # fmt: skip
            part += 1


def up(
    address_P: torch.Tensor,
    up_weight: torch.Tensor,
    transposed: bool,
    bias_SF: torch.Tensor | None,
    activation: Activation,
    h: HiddenStates | None,
    tiles_M4: torch.Tensor,
    wants_a: bool,
    tiling: Tiling,
    parts: Parts | None = None,
    share: Share | None = None,
    a_PF: torch.Tensor | None = None,
) -> torch.Tensor:
    """a_PF = activation(rows @ up + bias), and the pre-activation into `h`, if that is given.

    Args:
        address_P: of the pairs' rows (`table_kernels.row_addresses`).
        up_weight: (S, F1, H), or (S, H, F1) if `transposed`.
        wants_a: if not, an empty tensor is returned.
        parts: the rows are under way, and each part is waited for before it is read.
        share: of an adapter, which the sums begin with; not of rows that are under way.
        a_PF: the result; None: allocated.
    """
    assert parts is None or share is None
    slots, hidden, width = up_weight.shape[0], *in_out(up_weight, transposed)
    inner = width // 2 if activation.gated else width
    if a_PF is None:
        a_PF = up_weight.new_empty(address_P.shape[0] if wants_a else 0, inner)
    columns, bk, flatten = tiling.columns, tiling.depth, tiling.flatten and share is None
    if activation.gated and not activation.interleaved:
        # Blocks of gate and of up together.
        half = columns // 2
        if transposed:
            flatten = False  # two accumulators, see the top
            weight = describe(up_weight, (slots, hidden, 2, inner), (1, bk, 1, half))
        else:
            weight = describe(up_weight, (slots, 2, inner, hidden), (1, 2, half, bk))
    else:
        weight = describe(up_weight, up_weight.shape, (1, bk, columns) if transposed else (1, columns, bk))
    data = a_PF if h is None else h.data
    start = None if h is None else h.start
    adapter, of_adapter = share_arguments(share, up_weight)
    _up[grid(a_PF, tiling)](
        address_P, weight, a_PF if bias_SF is None else bias_SF.contiguous(), data,
        tiles_M4 if start is None else start, a_PF, tiles_M4, *waits(parts, tiles_M4), *adapter, **of_adapter, H=hidden,
        F=inner, WIDTH=width, **constants(activation), HAS_BIAS=bias_SF is not None, HAS_START=start is not None,
        WANTS_H=h is not None, WANTS_A=wants_a, K_FIRST=transposed, BM=TILE_ROWS, BN=columns, BK=bk, BAND=BAND,
        FLATTEN=flatten, **waits_for(parts), MAPS=has_maps(a_PF.device), num_warps=tiling.warps,
        num_stages=stages(tiling, share),
    )  # fmt: skip
    return a_PF
