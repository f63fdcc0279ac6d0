"""Kernels for adapters of experts: what is thin, beside the grouped products of `gemm_tiles.py`.

    inner   u (P, Q)     =  rows @ a[slot]^T        rows where they lie, or in the order of pairs
    share   out (P, N)  +=  u @ b[slot]             inside the products (`_share`), before anything is written
    outer   da (S, Q, N) =  u^T @ rows              for each slot over its pairs

With a rank Q of 8 to 64 this is no work but the reading and writing of rows. So rows of a transport, of the arena or of
a rank's own tokens are read by their addresses, and no copy is made for each of their pairs; and an adapter's share is
what the accumulators of a product begin with, so that the activation, its backward and the rounding see the sum. `add`
is for products of PyTorch's: one pass over their output.

Of one layer, forward and backward, in passes over one row of the hidden size H for each pair (F = 3/8 H, as
Qwen3-30B-A3B; 134 MB with 4,096 tokens), read or written, by counting:

    frozen experts without adapters                                  10
    adapters with copies of x and dy, shares added to products,
    and the activation and its backward by themselves                29
    as it is here                                                    17, of which 6 read x and dy where they lie

u of both adapters is kept from the forward: 2 Q numbers for each pair, where h has 2 F.

Programs walk the tiles of pairs that there are, so rows past the count cost nothing. Sums are in float32 and are
rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from carpool.experts.gemm import gemm_tiles
from carpool.experts.gemm.gemm_tiles import BAND, TILE_ROWS, Tiling, _load_rows, _place, _share
from carpool.experts.pair_kernels import programs
from carpool.kernels.quick import cdiv, power_of_2, quick

COLUMNS = 128
# The largest rank whose share fits into shared memory beside a product's tiles; `add` takes larger ones piece by piece.
MOST = 128
# How deep a step of `inner` is, and pairs of a step of `outer`.
DEPTH, STEP = 128, 32
# Programs that share a tile of pairs in `inner`.
SPLIT = 2


class Share(NamedTuple):
    """An adapter's share in a product.

    Attributes:
        inner_PQ: u.
        factor: (S, N, Q) if `q_last`, else (S, Q, N).
    """

    inner_PQ: torch.Tensor
    factor: torch.Tensor
    q_last: bool

    def of(self, slots: slice) -> Share:
        """That in a product of these slots alone."""
        return self._replace(factor=self.factor[slots])


def share_arguments(share: Share | None, unused: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """What a product with `_share` is given, and what it is compiled for."""
    if share is None:
        return (unused, unused), {"Q": 0, "BQ": 0, "Q_LAST": False}
    rank = share.inner_PQ.shape[1]
    return (share.inner_PQ, share.factor.contiguous()), {
        "Q": rank,
        "BQ": min(MOST, padded(rank)),
        "Q_LAST": share.q_last,
    }


def stages(tiling: Tiling, share: Share | None) -> int:
    """Of a product: as its tiling says, less what the share takes of shared memory."""
    if share is None:
        return tiling.stages
    return gemm_tiles.stages_beside(tiling, padded(share.inner_PQ.shape[1]), share.factor.device)


def padded(rank: int) -> int:
    """Of a block: tensor cores take 16 and more."""
    return max(16, power_of_2(rank))


@quick
@triton.jit
def _add(  # type: ignore[no-untyped-def]
    inner, factor, out, tiles, Q: tl.constexpr, N: tl.constexpr, Q_LAST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    heights = tl.load(tiles)
    for tile in range(tl.program_id(0), heights * COLUMNS, tl.num_programs(0)):
        expert, _, pair, live, n = _place(tiles, tile, heights, COLUMNS, BAND, BM)
        column = n * BN + tl.arange(0, BN)
        total = _share(inner, factor, expert, pair, live, column, column < N, Q, N, Q_LAST, BQ)
        at = out + pair.to(tl.int64)[:, None] * N + column[None, :]
        mask = live[:, None] & (column < N)[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def add(out_PN: torch.Tensor, share: Share, tiles_M4: torch.Tensor) -> None:
    """Add an adapter's share to `out_PN`, in place.

    Args:
        tiles_M4: of `table_kernels.tile_table`.
    """
    (inner_PQ, factor), constants = share_arguments(share, out_PN)
    _add[programs(out_PN, TILE_ROWS, COLUMNS)](
        inner_PQ, factor, out_PN, tiles_M4, N=out_PN.shape[1], BM=TILE_ROWS, BN=COLUMNS, BAND=BAND, num_warps=8,
        # Pieces of a larger rank are not asked for a tile ahead: all of them would be in shared memory.
        num_stages=3 if constants["Q"] <= MOST else 1, **constants,
    )  # fmt: skip


@quick
@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    rows, factor, out, tiles, K: tl.constexpr, Q: tl.constexpr, Q_LAST: tl.constexpr, GATHERED: tl.constexpr,
    BM: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    heights = tl.load(tiles)
    q = tl.arange(0, BQ)
    for part in range(tl.program_id(0), heights * SPLIT, tl.num_programs(0)):
        entry = tiles + (1 + part // SPLIT) * 4
        expert = tl.load(entry)
        pair = tl.load(entry + 1) + part % SPLIT * BM + tl.arange(0, BM)
        live = pair < tl.load(entry + 2)
        matrix = factor + expert.to(tl.int64) * (Q * K)
        total = tl.zeros((BM, BQ), tl.float32)
        if GATHERED:
            row = tl.load(rows + pair, mask=live, other=0)
        for k in range(0, K, BK):
            column = k + tl.arange(0, BK)
            if GATHERED:
                x = _load_rows(row, k, K, BK, DTYPE)
            else:
                at_x = rows + pair.to(tl.int64)[:, None] * K + column[None, :]
                x = tl.load(at_x, mask=live[:, None] & (column < K)[None, :], other=0.0)
            at = column[:, None] * Q + q[None, :] if Q_LAST else q[None, :] * K + column[:, None]
            a = tl.load(matrix + at, mask=(column < K)[:, None] & (q < Q)[None, :], other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee")
        at_out = out + pair.to(tl.int64)[:, None] * Q + q[None, :]
        tl.store(at_out, total.to(DTYPE), mask=live[:, None] & (q < Q)[None, :])


def inner(
    rows: torch.Tensor,
    factor: torch.Tensor,
    q_last: bool,
    tiles_M4: torch.Tensor,
    out_PQ: torch.Tensor | None = None,
) -> torch.Tensor:
    """(P, Q): every row times its slot's factor, (S, K, Q) if `q_last`, else (S, Q, K).

    Args:
        rows: (P, K), in the order of pairs; or (P,) int64, their addresses (`table_kernels.row_addresses`), which are
            of rows in the factor's dtype.
        tiles_M4: of `table_kernels.tile_table`.
        out_PQ: the output; None: allocated.
    """
    width, rank = factor.shape[1:] if q_last else factor.shape[:0:-1]
    if out_PQ is None:
        out_PQ = factor.new_empty(rows.shape[0], rank)
    _inner[programs(out_PQ, TILE_ROWS // SPLIT, rank, 4 * SPLIT)](
        rows, factor.contiguous(), out_PQ, tiles_M4, K=width, Q=rank, Q_LAST=q_last, GATHERED=rows.dim() == 1,
        BM=TILE_ROWS // SPLIT, BQ=padded(rank), SPLIT=SPLIT, num_warps=4, num_stages=3,
        BK=gemm_tiles.depth_that_fits(
            TILE_ROWS // SPLIT + padded(rank), min(DEPTH, power_of_2(width)), 3, factor.device
        ),
    )  # fmt: skip
    return out_PQ


@quick
@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    inner, rows, weights, order, out, ranked, N: tl.constexpr, Q: tl.constexpr, Q_LAST: tl.constexpr,
    GATHERED: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    entry = ranked + tl.program_id(0) // COLUMNS * 4
    expert, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    column = tl.program_id(0) % COLUMNS * BN + tl.arange(0, BN)
    q = tl.arange(0, BQ)
    total = tl.zeros((BN, BQ), tl.float32)
    for first in range(begin, end, STEP):
        pair = first + tl.arange(0, STEP)
        live = pair < end
        place = pair.to(tl.int64)[:, None]
        # Masked on both sides: what follows the slot's last pair may be NaN, and 0 * NaN is NaN.
        u = tl.load(inner + place * Q + q[None, :], mask=live[:, None] & (q < Q)[None, :], other=0.0)
        if WEIGHTED:
            weight = tl.load(weights + tl.load(order + pair, mask=live, other=0), mask=live, other=0.0)
            u = (u * weight[:, None]).to(DTYPE)
        if GATHERED:
            address = tl.load(rows + pair, mask=live, other=0)
            row = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)[:, None]
            mask = (address != 0)[:, None] & (column < N)[None, :]
        else:
            row = rows + place * N
            mask = live[:, None] & (column < N)[None, :]
        x = tl.load(row + column[None, :], mask=mask, other=0.0)
        # The wide side is the first one, for tensor cores take 64 and more of it.
        total = tl.dot(tl.trans(x), u, total, input_precision="ieee")
    at = column[:, None] * Q + q[None, :] if Q_LAST else q[None, :] * N + column[:, None]
    mask_out = (column < N)[:, None] & (q < Q)[None, :]
    tl.store(out + expert.to(tl.int64) * (Q * N) + at, total.to(DTYPE), mask=mask_out)


def outer(
    inner_PQ: torch.Tensor,
    rows: torch.Tensor,
    width: int,
    q_last: bool,
    ranked_S4: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """(S, N, Q) if `q_last`, else (S, Q, N): for each slot the sum of u^T row over its pairs; zero without pairs.

    Args:
        rows: as in `inner`.
        width: N, of a row.
        ranked_S4: of `table_kernels.tile_table`.
        weights: of rows' columns, and which of these each pair has (`Pairs.order_P`): u is multiplied by it.
    """
    of_columns, order_P = weights or (inner_PQ, ranked_S4)
    slots, rank = ranked_S4.shape[0], inner_PQ.shape[1]
    out = inner_PQ.new_empty(slots, width, rank) if q_last else inner_PQ.new_empty(slots, rank, width)
    _outer[(slots * cdiv(width, COLUMNS),)](
        inner_PQ, rows, of_columns, order_P, out, ranked_S4, N=width, Q=rank, Q_LAST=q_last, GATHERED=rows.dim() == 1,
        WEIGHTED=weights is not None, BN=COLUMNS, BQ=padded(rank), num_warps=4, num_stages=4,
        STEP=gemm_tiles.depth_that_fits(COLUMNS + padded(rank), STEP, 4, out.device),
    )  # fmt: skip
    return out
