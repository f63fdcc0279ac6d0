"""The CUDA side of `LeasedStates.saved`: copy the tokens that arrived in each slab, and nothing else.

A persistent grid walks tiles of ROWS x BLOCK over all slabs; a tile past its slab's count costs one read of that count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.kernels.quick import power_of_2, quick


@quick
@triton.jit(do_not_specialize=["slab", "slabs"])
def _copy_slabs(  # type: ignore[no-untyped-def]
    x, came, start, out, slab, slabs, WIDTH: tl.constexpr, HAS_START: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    blocks = tl.cdiv(slab, ROWS)
    for tile in range(tl.program_id(0), slabs * blocks * chunks, tl.num_programs(0)):
        number = tile // (blocks * chunks)
        first = (tile // chunks % blocks) * ROWS
        count = tl.load(came + number)
        begin = number.to(tl.int64) * slab * WIDTH
        target = begin
        if HAS_START:
            target = tl.multiple_of(tl.load(start + number), 16)
        if (first < count) & (target >= 0):
            row = first + tl.arange(0, ROWS)
            column = (tile % chunks) * BLOCK + tl.arange(0, BLOCK)
            mask = (row < count)[:, None] & (column < WIDTH)[None, :]
            at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            tl.store(out + target + at, tl.load(x + begin + at, mask=mask), mask=mask)


def copy_slabs(x_RH: torch.Tensor, came_W: torch.Tensor, slab: int, kept: HiddenStates) -> None:
    """Copy row i of each slab of x_RH to row i of the same slab of `kept`, for i below the slab's count."""
    rows, width = x_RH.shape
    slabs = came_W.shape[0]
    if rows == 0:
        return
    block = min(1024, power_of_2(width))
    processors = torch.cuda.get_device_properties(x_RH.device).multi_processor_count if x_RH.is_cuda else 1
    programs = 8 * processors
    _copy_slabs[(programs,)](
        x_RH, came_W, came_W if kept.start is None else kept.start, kept.data, slab, slabs,
        WIDTH=width, HAS_START=kept.start is not None, ROWS=max(1, 8192 // block), BLOCK=block, num_warps=4,
    )  # fmt: skip
