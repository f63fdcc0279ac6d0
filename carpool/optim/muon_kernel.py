"""The two passes over memory of Muon's step, before and after Newton–Schulz; `muon.take_gradient` and `muon.change`
define what they compute.

    take_gradient    gradient, momentum             ->  momentum, update    16 bytes an element in float32, 14 bfloat16
    change           weight, low bits, update       ->  weight, low bits    10 and 10

Multiplications and additions are not fused, so that the results are those of plain PyTorch bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, quick

BLOCK = 2048


@quick
@triton.jit
def _take_gradient(  # type: ignore[no-untyped-def]
    gradients, momenta, updates, numbers, size, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor, beta = tl.load(numbers), tl.load(numbers + 1)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    m = tl.load(momenta + offset, mask=inside, other=0).to(tl.float32)
    g = m
    if factor == factor:  # else all stays as it is
        g = tl.load(gradients + offset, mask=inside, other=0).to(tl.float32) * factor
        m = m + (g - m) * (1 - beta)
        tl.store(momenta + offset, m.to(momenta.dtype.element_ty), mask=inside)
    u = m
    if NESTEROV:
        u = g + (m - g) * beta
    tl.store(updates + offset, u.to(updates.dtype.element_ty), mask=inside)


@quick
@triton.jit
def _change(  # type: ignore[no-untyped-def]
    weights, lows, updates, numbers, scale, size, BFLOAT16_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor, rate, decay = tl.load(numbers), tl.load(numbers + 2), tl.load(numbers + 3)
    if factor == factor:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < size
        u = tl.load(updates + offset, mask=inside, other=0).to(tl.float32)
        w = tl.load(weights + offset, mask=inside, other=0)
        if BFLOAT16_WEIGHT:
            low = tl.load(lows + offset, mask=inside, other=0)
            w = ((w.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
        w = w - w * decay
        w = w - u * (rate * scale)
        if BFLOAT16_WEIGHT:
            bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
            upper = (bits + 0x8000) >> 16
            tl.store(weights + offset, upper.to(tl.int16), mask=inside)
            tl.store(lows + offset, (bits - (upper << 16)).to(tl.int16), mask=inside)
        else:
            tl.store(weights + offset, w, mask=inside)


def take_gradient(
    gradient: torch.Tensor, momentum: torch.Tensor, update: torch.Tensor, numbers: torch.Tensor, nesterov: bool
) -> None:
    """As `muon.take_gradient`. Contiguous tensors of one shape."""
    size = gradient.numel()
    _take_gradient[(cdiv(size, BLOCK),)](
        gradient, momentum, update, numbers, size, NESTEROV=nesterov, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
    )


def change(
    weight: torch.Tensor, low_bits: torch.Tensor | None, update: torch.Tensor, numbers: torch.Tensor, scale: float
) -> None:
    """As `muon.change`. Contiguous tensors of one shape."""
    size, low = weight.numel(), low_bits is not None
    bits = weight.view(torch.int16) if low else weight
    _change[(cdiv(size, BLOCK),)](
        bits, low_bits if low else bits, update, numbers, scale, size,
        BFLOAT16_WEIGHT=low, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
