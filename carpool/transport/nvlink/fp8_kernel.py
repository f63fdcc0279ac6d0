"""Rows that travelled as FP8, back in the layer's dtype: code * scale, rows that came and no others.

The dispatch kernel quantised them (dispatch_kernel.py). Whoever computes on the codes themselves does not need this.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)


@triton.jit
def dequantise_kernel(  # type: ignore[no-untyped-def]
    code, scale, received, out, rows, capacity, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr
):
    """code: (R, H) e4m3. scale: (R, ceil(H / 128)) float32. received: (W,) rows in each slab of `capacity`. Programs:
    blocks of BR rows x blocks of BH columns."""
    groups: tl.constexpr = (H + GROUP - 1) // GROUP
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    came = (row % capacity) < tl.load(received + row // capacity, mask=row < rows, other=0)
    inside = came[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    value = tl.load(code + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + row.to(tl.int64)[:, None] * groups + (column // GROUP)[None, :], mask=inside, other=0.0)
    tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=inside)
