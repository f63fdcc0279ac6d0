"""Gradients of expert weights with a fused gather: the fused products dup and ddown.

    out[slot] = sum over the slot's pairs p of  a[p]^T b[p]         (M, N), float32, rounded once

    dup       a = dh, b = rows of x by address              stored (in, out): a = rows of x, b = dh
    ddown     a = rows of dy by address, b = weight * a     stored (in, out): a = weight * a, b = rows of dy

So either operand may be addresses (`table_kernels.row_addresses`) instead of values. The sum runs over the pairs of one
slot: both operands are masked past the slot's last pair, because the values there may be NaN, and 0 * NaN is NaN. A
slot without pairs gets zeros. There is one program per tile of out, a number that the host knows; slots with most pairs
come first (`ranked_S4`), so that the tiles of a slot with a large share of all pairs are not the last to finish. The
hardware schedules programs as multiprocessors become free. For flat tiling, Hopper has a kernel of its own:
outer_hopper_kernels.py.

The addresses of the next step's rows are loaded one step ahead; the rows themselves, three steps ahead, by cp.async.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.experts.gemm.gemm_tiles import BAND, TILE_ROWS, Tiling
from carpool.kernels.quick import cdiv, quick


@triton.jit
def _operand(  # type: ignore[no-untyped-def]
    data, at, pair, end, first, WIDTH: tl.constexpr, GATHERED: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """(BK, BLOCK): columns from `first` of the rows of pairs; zero past the expert's last, and past the last column."""
    column = first + tl.arange(0, BLOCK)
    mask = (pair < end)[:, None]
    if GATHERED:
        mask = (at != 0)[:, None]
        row = tl.multiple_of(at.to(tl.pointer_type(DTYPE)), 16)
    else:
        row = data + pair.to(tl.int64) * WIDTH
    if WIDTH % BLOCK != 0:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)


@quick
@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    a, b, out, ranked, M: tl.constexpr, N: tl.constexpr, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    ROWS: tl.constexpr = (M + BM - 1) // BM
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    entry = ranked + tl.program_id(0) // (ROWS * COLUMNS) * 4
    expert = tl.load(entry)
    begin = tl.load(entry + 1)
    end = tl.load(entry + 2)
    tile = tl.program_id(0) % (ROWS * COLUMNS)
    band = tile // (BAND * COLUMNS)
    height = tl.minimum(ROWS - band * BAND, BAND)
    within = tile % (BAND * COLUMNS)
    m = (band * BAND + within % height) * BM
    n = within // height * BN
    total = tl.zeros((BM, BN), tl.float32)
    step = tl.arange(0, BK)
    at = step.to(tl.int64)
    if GATHER_A:
        at = tl.load(a + begin + step, mask=begin + step < end, other=0)
    if GATHER_B:
        at = tl.load(b + begin + step, mask=begin + step < end, other=0)
    for first in range(begin, end, BK):
        pair = first + step
        left = _operand(a, at, pair, end, m, M, GATHER_A, BK, BM, DTYPE)
        right = _operand(b, at, pair, end, n, N, GATHER_B, BK, BN, DTYPE)
        # Asked for one step ahead: rows can be asked for only when their addresses are there.
        following = pair + BK
        if GATHER_A:
            at = tl.load(a + following, mask=following < end, other=0)
        if GATHER_B:
            at = tl.load(b + following, mask=following < end, other=0)
        total = tl.dot(left.T, right, total)
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    at = (expert.to(tl.int64) * M + row)[:, None] * N + column[None, :]
    tl.store(out + at, total.to(DTYPE), mask=(row < M)[:, None] & (column < N)[None, :])


def outer(
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, int],
    ranked_S4: torch.Tensor,
    dtype: torch.dtype,
    tiling: Tiling,
) -> torch.Tensor:
    """(S, M, N): for each slot a^T b over its pairs, added in float32; zero for a slot without pairs.

    Args:
        a, b: (P, M) and (P, N) values of pairs; or, of one of them, the (P,) addresses of its rows.
        widths: M, N.
        ranked_S4: slots in the order in which they are begun (`table_kernels.tile_table`).
    """
    slots, (m, n) = ranked_S4.shape[0], widths
    out_SMN = torch.empty(slots, m, n, dtype=dtype, device=ranked_S4.device)
    if tiling.flatten and out_SMN.is_cuda:
        from carpool.experts.gemm import outer_hopper_kernels

        if outer_hopper_kernels.takes(out_SMN, (a.dim() == 1) + (b.dim() == 1)):
            outer_hopper_kernels.launch(a, b, ranked_S4, out_SMN)
            return out_SMN
    tiles = cdiv(m, TILE_ROWS) * cdiv(n, tiling.columns)
    _outer[(slots * tiles,)](
        a, b, out_SMN, ranked_S4, M=m, N=n, GATHER_A=a.dim() == 1, GATHER_B=b.dim() == 1, BM=TILE_ROWS,
        BN=tiling.columns, BK=tiling.depth, BAND=BAND, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out_SMN
