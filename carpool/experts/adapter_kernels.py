"""The second of an adapter's two thin grouped products: added to what is there, in one pass.

    out (P, N)  +=  u (P, Q) @ b[slot] (Q, N)        u = rows @ a[slot], from PyTorch's grouped product

With a rank Q of 8 to 64 this is no work but the reading and writing of `out`, which takes as long as an addition. As
two operations, a product and an addition, it is 5 passes over P x N instead of 2, and a temporary tensor as large as
the pre-activation. Programs walk the tiles of pairs that there are (`gemm_tiles.py`), so rows past the count cost
nothing. The sum is in float32 and is rounded once.

The product before it writes P x Q only, and reads what the product with the weights has just read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.experts.gemm_tiles import BAND, TILE_ROWS, _place
from carpool.experts.pair_kernels import programs
from carpool.kernels.quick import power_of_2, quick

COLUMNS = 128


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
        column, q = n * BN + tl.arange(0, BN), tl.arange(0, BQ)
        row = pair.to(tl.int64)[:, None]
        u = tl.load(inner + row * Q + q[None, :], mask=live[:, None] & (q < Q)[None, :], other=0.0)
        at = column[None, :] * Q + q[:, None] if Q_LAST else q[:, None] * N + column[None, :]
        inside = (q < Q)[:, None] & (column < N)[None, :]
        b = tl.load(factor + expert.to(tl.int64) * (Q * N) + at, mask=inside, other=0.0)
        total = tl.dot(u, b, input_precision="ieee")
        mask = live[:, None] & (column < N)[None, :]
        total += tl.load(out + row * N + column[None, :], mask=mask, other=0.0)
        tl.store(out + row * N + column[None, :], total.to(out.dtype.element_ty), mask=mask)


def add_thin(
    out_PN: torch.Tensor, inner_PQ: torch.Tensor, factor: torch.Tensor, q_last: bool, tiles_M4: torch.Tensor
) -> None:
    """Add each row's product with its slot's factor, (S, N, Q) if `q_last`, else (S, Q, N), to `out_PN`, in place.

    Args:
        tiles_M4: of `table_kernels.tile_table`.
    """
    rank, columns = inner_PQ.shape[1], out_PN.shape[1]
    _add[programs(out_PN, TILE_ROWS, COLUMNS)](
        inner_PQ, factor.contiguous(), out_PN, tiles_M4, Q=rank, N=columns, Q_LAST=q_last, BM=TILE_ROWS, BN=COLUMNS,
        BQ=max(16, power_of_2(rank)), BAND=BAND, num_warps=8,
    )  # fmt: skip
