"""The CUDA side of `ordered_sum`: one program per (output row, block of columns).

    out[r, :] = sum over i in starts[r] .. starts[r+1]-1, in that order, of  weight[order[i]] * values[order[i], :]

float64 adds in float64, all else in float32. A program's loop runs over its row's inputs, a handful (experts per
arrival, ranks per token), so there is nothing to split and no atomics. It reads every input once, in 16-byte pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, power_of_2, quick

BLOCK = 1024


@quick
@triton.jit
def _kernel(values, order, starts, weight, out, columns, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    for i in range(begin, end):
        source = tl.load(order + i)
        value = tl.load(values + source * columns + column, mask=inside, other=0.0).to(total.dtype)
        if HAS_WEIGHT:
            value *= tl.load(weight + source)
        total += value
    tl.store(out + row * columns + column, total, mask=inside)


def launch(
    values_NH: torch.Tensor,
    order_N: torch.Tensor,
    starts: torch.Tensor,
    weight_N: torch.Tensor | None,
    out_RH: torch.Tensor,
) -> None:
    """Run the kernel. `starts` has one entry more than there are output rows; all int64, values contiguous."""
    rows, columns = out_RH.shape
    if rows == 0 or columns == 0:
        return
    block = min(BLOCK, power_of_2(columns))
    _kernel[(rows, cdiv(columns, block))](
        values_NH,
        order_N,
        starts,
        weight_N if weight_N is not None else values_NH,
        out_RH,
        columns,
        HAS_WEIGHT=weight_N is not None,
        BLOCK=block,
        num_warps=4,
    )
