"""The CUDA side of `carpool.experts.quantised.dequantise`: codes and scales in, matrices out, in one pass.

    group     what shares a scale: a block of 64 in nf4, a row in int8
    program   a few groups of one slot, a piece of columns at a time; nothing to do for a slot without rows

It is bound by what it writes: of Qwen3-30B-A3B's up projection of a layer, 0.23 GB of codes and scales in, 0.81 GB out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, quick

COLUMNS = 256
ELEMENTS = 4096  # of a program at a time


@quick
@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    code, scale, levels, out, offsets, groups, WIDTH: tl.constexpr, NF4: tl.constexpr, STEP: tl.constexpr,
    SKIPS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    rows = 1
    if SKIPS:
        rows = tl.load(offsets + slot) - tl.load(offsets + slot - 1, mask=slot > 0, other=0)
    if rows > 0:
        group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        inside = group < groups
        at = slot.to(tl.int64) * groups + group
        largest = tl.load(scale + at, mask=inside, other=0.0)[:, None]
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            if NF4:
                byte = first // 2 + tl.arange(0, COLUMNS // 2)
                both = tl.load(
                    code + at[:, None] * (WIDTH // 2) + byte[None, :],
                    mask=inside[:, None] & (byte < WIDTH // 2)[None, :], other=0,
                ).to(tl.int32)  # fmt: skip
                value = tl.join(tl.load(levels + (both >> 4)), tl.load(levels + (both & 15)))
                value = tl.reshape(value, (GROUPS, COLUMNS)) * largest
            else:
                value = tl.load(code + at[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(tl.float32)
                value = value * largest * STEP
            tl.store(out + at[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), mask=mask)


def dequantise(
    code: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    offsets_S: torch.Tensor | None,
    levels: torch.Tensor,
    block: int,
    step: float,
) -> torch.Tensor:
    """As `carpool.experts.quantised.dequantise`.

    Args:
        levels: those of nf4, on the device.
        block: values of nf4 that share a scale.
        step: of int8, beside the scale."""
    nf4 = code.dtype == torch.uint8
    slots, rows, packed = code.shape
    width = 2 * packed if nf4 else packed
    out = torch.empty(slots, rows, width, dtype=dtype, device=code.device)
    if out.numel() == 0:
        return out
    group = block if nf4 else width
    columns = min(group, COLUMNS) if nf4 else COLUMNS
    groups, each = rows * (width // group), ELEMENTS // columns
    _dequantise[cdiv(groups, each), slots](
        code, scale, levels, out, code if offsets_S is None else offsets_S, groups, WIDTH=group, NF4=nf4, STEP=step,
        SKIPS=offsets_S is not None, GROUPS=each, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return out
