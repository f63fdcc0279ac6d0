"""Rows as FP8: before they travel, and when they have arrived. `carpool.transport.packets` says what a packet is, and
defines in plain PyTorch what is computed here.

Quantising takes arithmetic, and the few programs that fill the links have little to spare: inside the dispatch kernel
it took 811 us at T 8192, H 4096, more than the rows in bf16 (575). So it is a kernel of its own, over all SMs, which
reads x once. Whoever computes in FP8 reads packets as they are; for all others rows that stay on their rank keep their
precision, and the rest is widened.
"""

from __future__ import annotations

import triton
import triton.language as tl

from carpool.quick import quick

GROUP = tl.constexpr(128)
FP8_MAX = tl.constexpr(448.0)


@quick
@triton.jit
def quantise_kernel(  # type: ignore[no-untyped-def]
    x, packet, came, rows, slab, H: tl.constexpr, BYTES: tl.constexpr, HAS_CAME: tl.constexpr, BR: tl.constexpr
):
    """x: (rows, H). packet: (rows, BYTES) uint8, out. came: (W,) rows in each slab, if HAS_CAME; else all are there.
    Programs: blocks of BR rows x groups of 128 columns."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    there = row < rows
    if HAS_CAME:
        there = (row % slab) < tl.load(came + row // slab, mask=there, other=0)
    inside = there[:, None] & (column < H)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-30) / FP8_MAX
    inverse = 1.0 / scale
    code = (value * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    begin = row.to(tl.int64) * BYTES
    tl.store(packet + begin[:, None] + column[None, :], code, mask=inside)
    scales = packet.to(tl.pointer_type(tl.float32))
    tl.store(scales + (begin + (H + 3) // 4 * 4) // 4 + tl.program_id(1), scale, mask=there)


@quick
@triton.jit
def dequantise_kernel(  # type: ignore[no-untyped-def]
    packet, came, out, rows, slab, H: tl.constexpr, BYTES: tl.constexpr, BR: tl.constexpr
):
    """packet: (rows, BYTES) uint8. came: (W,) rows in each slab. out: (rows, H). Programs as in `quantise_kernel`."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    there = (row % slab) < tl.load(came + row // slab, mask=row < rows, other=0)
    inside = there[:, None] & (column < H)[None, :]
    begin = row.to(tl.int64) * BYTES
    code = tl.load(packet + begin[:, None] + column[None, :], mask=inside, other=0)
    scales = packet.to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + (begin + (H + 3) // 4 * 4) // 4 + tl.program_id(1), mask=there, other=0.0)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
