"""The CUDA side of `carpool.experts.quantised.dequantise`: codes and scales in, matrices out, in one pass.

    group     what shares a scale: a block of 64 in nf4, of 32 in mxfp4, a row in int8
    program   a few groups of one slot, a piece of columns at a time; nothing to do for a slot without rows

It is bound by what it writes: of Qwen3-30B-A3B's up projection of a layer, 0.21 GB of codes and scales in, 0.81 GB out.
Magnitudes of nf4 are dequantised in float64, one for 64 values, so that all devices make the same bits.
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
    code, scale, floats, tables, out, offsets, groups, begin, end, stride, floats_stride, WIDTH: tl.constexpr,
    KIND: tl.constexpr, STEP: tl.constexpr, SUPERBLOCK: tl.constexpr, SKIPS: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    rows = 1
    if SKIPS:
        rows = tl.load(offsets + slot) - tl.load(offsets + slot - 1, mask=slot > 0, other=0)
    if rows > 0:
        group = begin + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        inside = group < end
        at = slot.to(tl.int64) * groups + group
        at_out = slot.to(tl.int64) * (end - begin) + group - begin
        largest = tl.load(scale + slot.to(tl.int64) * stride + group, mask=inside, other=0)
        if KIND == "nf4":
            values = floats + slot.to(tl.int64) * floats_stride
            step = tl.load(values + group // SUPERBLOCK, mask=inside, other=0.0).to(tl.float64)
            mean = tl.load(values + (groups + SUPERBLOCK - 1) // SUPERBLOCK).to(tl.float64)
            around = tl.load(tables + 16 + largest.to(tl.int32)).to(tl.float64)
            largest = (around * step + mean).to(tl.float32)
        elif KIND == "mxfp4":
            # 2**-127 has no leading one.
            bits = largest.to(tl.int32)
            largest = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
        largest = largest[:, None]
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (column < WIDTH)[None, :]
            if KIND == "int8":
                value = tl.load(code + at[:, None] * WIDTH + column[None, :], mask=mask, other=0).to(tl.float32)
                value = value * largest * STEP
            else:
                byte = first // 2 + tl.arange(0, COLUMNS // 2)
                both = tl.load(
                    code + at[:, None] * (WIDTH // 2) + byte[None, :],
                    mask=inside[:, None] & (byte < WIDTH // 2)[None, :], other=0,
                ).to(tl.int32)  # fmt: skip
                upper, lower = tl.load(tables + (both >> 4)), tl.load(tables + (both & 15))
                if KIND == "nf4":
                    value = tl.join(upper, lower)
                else:
                    value = tl.join(lower, upper)
                value = tl.reshape(value, (GROUPS, COLUMNS)) * largest
            tl.store(out + at_out[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), mask=mask)


def dequantise(
    code: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    offsets_S: torch.Tensor | None,
    out: torch.Tensor,
    kind: str,
    group: int,
    superblock: int,
    step: float,
    first: int,
) -> None:
    """As `carpool.experts.quantised.dequantise`, into `out`.

    Args:
        scales: of nf4, codes of magnitudes and float32 beside them; of others twice the same.
        tables: `tables_of`; of int8 anything.
        group: values that share a scale; superblock: magnitudes of nf4 that do.
        step: of int8, beside the scale.
        first: of the matrices' rows that `out` has."""
    if out.numel() == 0:
        return
    slots, rows, width = out.shape
    columns = COLUMNS if kind == "int8" else group
    of_row, each = width // group, ELEMENTS // columns
    _dequantise[cdiv(rows * of_row, each), slots](
        code, *scales, tables, out, code if offsets_S is None else offsets_S, code.shape[1] * of_row, first * of_row,
        (first + rows) * of_row, scales[0].stride(0), scales[1].stride(0), WIDTH=group, KIND=kind, STEP=step,
        SUPERBLOCK=superblock, SKIPS=offsets_S is not None, GROUPS=each, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
