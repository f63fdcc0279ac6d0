"""The fused product dact: the gradient of a stays in registers.

    rows of dy, by their addresses  @  down^T   =   dA, of a tile of 128 pairs x 256 columns, float32, not rounded
    dA and h of the tile                        ->  dh,  weight * a,  and the tile's share of <dA, a> for each pair

`gemm_tiles.py` explains the tiles, and the waits for tokens in flight. The epilogue processes its tile in pieces (32
columns; 16 of gate and up each where they alternate): the whole tile at once spilled 1.7 KB per thread. Compiled for
sm_90 little spills: a few words for activations without a gate, and 72 bytes with waits for parts.

    F 1024, of one pair     4 tiles of columns, so 4 shares: <dA, a> over columns 0-255, 256-511, 512-767, 768-1023

`dact_hopper_kernels.py` computes flat tiles without waits: its warps finish one tile while the next is multiplied.

The weight's gradient is <dA, a>: `table_kernels.sum_shares` adds the shares in order, and no atomics are needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.experts.activation_kernels import _slopes, constants
from carpool.experts.base import Activation
from carpool.experts.gemm.adapter_kernels import Share, share_arguments, stages
from carpool.experts.gemm.gemm_tiles import (
    BAND,
    TILE_ROWS,
    Parts,
    Tiling,
    _halves,
    _load_b,
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
from carpool.kernels.quick import cdiv, quick
from carpool.kernels.signals import wait_part


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
    address, weight, factors, order, h, dh, scaled, partial, tiles, heights, mine, pairs, inner, thin,
    Q: tl.constexpr, BQ: tl.constexpr, Q_LAST: tl.constexpr, H: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr, WANTS_SCALED: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr, PIECE: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """As `_up_tiles`."""
    DTYPE: tl.constexpr = dh.dtype.element_ty
    COLUMNS: tl.constexpr = (F + BN - 1) // BN
    for tile in tl.range(mine, heights * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        expert, _, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        row = tl.load(address + pair, mask=live, other=0)
        if Q:
            column = n * BN + tl.arange(0, BN)
            grad = _share(inner, thin, expert, pair, live, column, column < F, Q, F, Q_LAST, BQ)
        else:
            grad = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            dy = _load_rows(row, k, H, BK, DTYPE)
            grad = tl.dot(dy, _load_b(weight, expert, n * BN, k, F, H, BN, BK, K_FIRST, MAPS), grad)
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
    host_status, timeout, verb, sources, each, parts, inner, thin, Q: tl.constexpr, BQ: tl.constexpr,
    Q_LAST: tl.constexpr, H: tl.constexpr,
    F: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_START: tl.constexpr,
    WANTS_SCALED: tl.constexpr, K_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr, PIECE: tl.constexpr, AWAITED: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, SPIN: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    there = 1
    if HAS_START:
        begin = tl.load(start)
        h += tl.multiple_of(begin, 16)
        # If the arena was too small there is no h, and the results are undefined.
        there = tl.where(begin < 0, 0, 1)
    if not AWAITED:
        _dact_tiles(
            address, weight, factors, order, h, dh, scaled, partial, tiles, tl.load(tiles) * there, tl.program_id(0),
            pairs, inner, thin, Q, BQ, Q_LAST, H, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT,
            WANTS_SCALED, K_FIRST, BM, BN, BK, BAND, FLATTEN, PIECE, MAPS,
        )  # fmt: skip
    else:
        part, before = 0, 0
        # Not `for`: the compiler flattens the loop of tiles only if no such loop is around it.
        while part < parts:
            wait_part(flags, epochs, part, timeout, status, host_status, verb, sources, each, STRIDE, PAD, SPIN)
            first, heights, mine = _of_part(starts, part, before)
            before += _dact_tiles(
                address, weight, factors, order, h, dh, scaled, partial, tiles + first * 4, heights * there, mine,
                pairs, inner, thin, 0, 0, False, H, F, WIDTH, NAME, GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA,
                SHIFT, WANTS_SCALED, K_FIRST, BM, BN, BK, BAND, FLATTEN, PIECE, MAPS,
            )  # fmt: skip
            part += 1


def down_backward(
    address_P: torch.Tensor,
    down_weight: torch.Tensor,
    transposed: bool,
    activation: Activation,
    h: HiddenStates,
    weight_RJ: torch.Tensor,
    order_P: torch.Tensor,
    tiles_M4: torch.Tensor,
    wants_scaled: bool,
    tiling: Tiling,
    parts: Parts | None = None,
    share: Share | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With dA = rows of dy @ down^T, which is never written: (dh_PF1, weight * a, share_NP), where the sum of share_NP
    over the blocks of columns is <dA, a>. `weight * a` is empty without `wants_scaled`.

    Args:
        down_weight: (S, H, F), or (S, F, H) if `transposed`.
        parts, share: as in `up_kernels.up`.
        out: the results; None: allocated.
    """
    assert parts is None or share is None
    inner, hidden = in_out(down_weight, transposed)
    pairs, bn, bk = address_P.shape[0], tiling.columns, tiling.depth
    if out is None:
        share_NP = torch.empty(cdiv(inner, bn), pairs, dtype=torch.float32, device=address_P.device)
        scaled_PF = down_weight.new_empty(pairs if wants_scaled else 0, inner)
        out = down_weight.new_empty(pairs, h.width), scaled_PF, share_NP
    dh_PF1, scaled_PF, share_NP = out
    if tiling.flatten and parts is None and down_weight.is_cuda:
        from carpool.experts.gemm import dact_hopper_kernels

        if dact_hopper_kernels.takes(down_weight, transposed, share):
            dact_hopper_kernels.down_backward(
                address_P, down_weight, transposed, activation, h, weight_RJ, order_P, tiles_M4, out, share
            )
            return out
    adapter, of_adapter = share_arguments(share, down_weight)
    _dact[grid(dh_PF1, tiling)](
        address_P, describe(down_weight, down_weight.shape, (1, bn, bk) if transposed else (1, bk, bn)), weight_RJ,
        order_P, h.data, tiles_M4 if h.start is None else h.start, dh_PF1, scaled_PF, share_NP, tiles_M4, pairs,
        *waits(parts, tiles_M4), *adapter, **of_adapter, H=hidden, F=inner, WIDTH=h.width, **constants(activation),
        HAS_START=h.start is not None, WANTS_SCALED=wants_scaled, K_FIRST=not transposed, BM=TILE_ROWS, BN=bn, BK=bk,
        BAND=BAND, FLATTEN=tiling.flatten and share is None, PIECE=16 if activation.interleaved else 32,
        **waits_for(parts), MAPS=has_maps(dh_PF1.device), num_warps=tiling.warps, num_stages=stages(tiling, share),
    )  # fmt: skip
    return out
