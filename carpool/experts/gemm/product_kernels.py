"""The fused products down and dx: plain grouped products.

    down   a @ down          (P, F) x (S, H, F)    ->  (P, H)
    dx     dh @ up^T         (P, F1) x (S, F1, H)  ->  (P, H)      rows that `pair_kernels.sum_pairs` adds up

The rows are already in the order of pairs, so both operands are loaded by tensor maps (where there are any), and the
tiles are those of the products before and after (`gemm_tiles.py`). Rows past an expert's last belong to other experts
or are undefined, and their results are not stored:

    tiles of 4 pairs, slot 2 has pairs 3 to 7      tile (slot 2, pair 7) loads rows 7-10 and writes row 7

Sums begin with an adapter's share, if there is one (`adapter_kernels.py`); the loop of tiles is not flattened then.

With `part`, a launch computes the tiles of that part alone, so that its outputs can be sent while the next part is
computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.experts.gemm.adapter_kernels import Share, share_arguments, stages
from carpool.experts.gemm.gemm_tiles import (
    BAND,
    TILE_ROWS,
    Tiling,
    _load_b,
    _of_part,
    _place,
    _share,
    describe,
    grid,
    has_maps,
    in_out,
)
from carpool.kernels.quick import quick


@quick
@triton.jit(do_not_specialize=["part"])
def _plain(  # type: ignore[no-untyped-def]
    rows, weight, out, tiles, starts, part, inner, factor, K: tl.constexpr, N: tl.constexpr, K_FIRST: tl.constexpr,
    Q: tl.constexpr, BQ: tl.constexpr, Q_LAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BAND: tl.constexpr, FLATTEN: tl.constexpr, PARTED: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    if PARTED:
        first, heights, _ = _of_part(starts, part, 0)
        tiles += first * 4
    else:
        heights = tl.load(tiles)
    for tile in tl.range(tl.program_id(0), heights * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        expert, first, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        if Q:
            there = n * BN + tl.arange(0, BN)
            total = _share(inner, factor, expert, pair, live, there, there < N, Q, N, Q_LAST, BQ)
        else:
            total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            # Rows past the expert's last belong to other experts or are undefined; their results are not stored.
            if MAPS:
                left = rows.load([first, k])
            else:
                step = k + tl.arange(0, BK)
                mask = live[:, None] & (step < K)[None, :] if K % BK != 0 else live[:, None]
                left = tl.load(rows + pair.to(tl.int64)[:, None] * K + step[None, :], mask=mask, other=0.0)
            total = tl.dot(left, _load_b(weight, expert, n * BN, k, N, K, BN, BK, K_FIRST, MAPS), total)
        column = n * BN + tl.arange(0, BN)
        at = pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live[:, None] & (column < N)[None, :])


def product(
    rows_PK: torch.Tensor,
    weight: torch.Tensor,
    k_first: bool,
    tiles_M4: torch.Tensor,
    tiling: Tiling,
    starts_N: torch.Tensor | None = None,
    part: int = 0,
    out_PN: torch.Tensor | None = None,
    share: Share | None = None,
) -> torch.Tensor:
    """(P, N): every row times its expert's matrix, (S, K, N) if `k_first`, else (S, N, K).

    Args:
        starts_N, part: compute only this part, of `table_kernels.tile_table`.
        out_PN: the output; None: allocated.
        share: of an adapter, with which the sums begin.
    """
    width, columns = in_out(weight, k_first)
    if out_PN is None:
        out_PN = rows_PK.new_empty(rows_PK.shape[0], columns)
    bn, bk = tiling.columns, tiling.depth
    adapter, constants = share_arguments(share, out_PN)
    _plain[grid(out_PN, tiling)](
        describe(rows_PK, rows_PK.shape, (TILE_ROWS, bk)),
        describe(weight, weight.shape, (1, bk, bn) if k_first else (1, bn, bk)), out_PN, tiles_M4,
        tiles_M4 if starts_N is None else starts_N, part, *adapter, **constants, K=width, N=columns, K_FIRST=k_first,
        BM=TILE_ROWS, BN=bn, BK=bk, BAND=BAND, FLATTEN=tiling.flatten and share is None, PARTED=starts_N is not None,
        MAPS=has_maps(out_PN.device),         num_warps=tiling.warps, num_stages=stages(tiling, share),
    )  # fmt: skip
    return out_PN
