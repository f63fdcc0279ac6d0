"""Packets on CUDA. `carpool.kernels.packets` says what a packet is, and defines in plain PyTorch what these compute.

Quantising takes arithmetic, and the few programs that fill the links have little to spare: inside the dispatch kernel
it took 811 us at T 8192, H 4096, more than the rows in bf16 (575). So it is a kernel of its own, over all SMs, which
reads x once. Whoever computes in FP8 reads packets as they are; for all others rows that stay on their rank keep their
precision, and the rest is widened.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool import kernels
from carpool.kernels.quick import cdiv, quick

GROUP = tl.constexpr(kernels.GROUP)
FP8_MAX = tl.constexpr(kernels.FP8_MAX)


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


def launch_quantise(
    x_TH: torch.Tensor, packet_bytes: int, came_W: torch.Tensor | None = None, slab: int = 0
) -> torch.Tensor:
    """(T, packet_bytes) uint8 of (T, H) rows, or of those of each slab that came."""
    rows, hidden = x_TH.shape
    packet_TB = torch.empty(rows, packet_bytes, dtype=torch.uint8, device=x_TH.device)
    if rows:
        grid = (cdiv(rows, 32), cdiv(hidden, kernels.GROUP))
        quantise_kernel[grid](
            x_TH, packet_TB, packet_TB if came_W is None else came_W, rows, max(1, slab), H=hidden, BYTES=packet_bytes,
            HAS_CAME=came_W is not None, BR=32, num_warps=4,
        )  # fmt: skip
    return packet_TB


def launch_dequantise(
    packet_RB: torch.Tensor, came_W: torch.Tensor, slab: int, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """(R, H) rows in `dtype`; those that did not come are not written."""
    rows, packet_bytes = packet_RB.shape
    out_RH = torch.empty(rows, hidden, dtype=dtype, device=packet_RB.device)
    if rows:
        grid = (cdiv(rows, 32), cdiv(hidden, kernels.GROUP))
        dequantise_kernel[grid](packet_RB, came_W, out_RH, rows, slab, H=hidden, BYTES=packet_bytes, BR=32, num_warps=4)
    return out_RH
