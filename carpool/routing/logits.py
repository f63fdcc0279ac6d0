"""The router's product for bfloat16 tokens and weights on CUDA: float32 logits from the tensor cores.

    forward     logits = x @ W^T            bfloat16 in, products exact in float32, added in float32, never rounded
    backward    dlogits (float32)  ->  [high, low], two bfloat16 side by side (T, 2E)
                dx = [high, low] @ [W; W]   added in float32, rounded once to bfloat16
                dW = high^T @ x + low^T @ x the same

So logits are those of a float32 product of the same numbers, up to the order of the sum, without a float32 copy of x
(which autograd kept for the backward) and without float32 arithmetic, which has a tenth of the speed. high + low have
16 bits of dlogits (error 2^-16), far below the rounding of dx and dW. Rounding dlogits to one bfloat16 would be half
of the arithmetic, and would lose half of the digits that a loss in float32 is for. `torch.mm(..., out_dtype=)` has no
derivative of its own.

    dlogits 1 + 2^-9 + 2^-14  ->  high 1, low 2^-9 + 2^-14
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from carpool.kernels.quick import cdiv, quick


@quick
@triton.jit(do_not_specialize=["size"])
def _split(values, pieces, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """pieces (T, 2 * WIDTH) bfloat16: the high halves of a row of values, then what they left."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < size, other=0.0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    place = (at // WIDTH) * (2 * WIDTH) + at % WIDTH
    tl.store(pieces + place, high, mask=at < size)
    tl.store(pieces + place + WIDTH, low, mask=at < size)


@torch._disable_dynamo  # as the ride: torch.compile compiles what is around it
def logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """(T, E) float32 = x_TH @ weight_EH^T, both bfloat16; see the module's docstring."""
    return _Logits.apply(x_TH, weight_EH)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return product(x_TH, weight_EH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        pieces_TE2 = split(dlogits_TE)
        dx_TH = dweight_EH = None
        if ctx.needs_input_grad[0]:
            dx_TH = pieces_TE2 @ weight_EH.repeat(2, 1)
        if ctx.needs_input_grad[1]:
            high_EH, low_EH = product(pieces_TE2.t(), x_TH).chunk(2)
            dweight_EH = (high_EH + low_EH).to(weight_EH.dtype)
        return dx_TH, dweight_EH


def split(values_TE: torch.Tensor) -> torch.Tensor:
    """(T, 2E) bfloat16: [high, low], whose sum is the float32 values but for 2^-16 of them."""
    tokens, width = values_TE.shape
    pieces_TE2 = torch.empty(tokens, 2 * width, dtype=torch.bfloat16, device=values_TE.device)
    if size := values_TE.numel():
        _split[(cdiv(size, 1024),)](values_TE.contiguous(), pieces_TE2, size, WIDTH=width, BLOCK=1024, num_warps=4)
    return pieces_TE2


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of bfloat16 matrices, added and returned in float32. Only CUDA has it in one operation."""
    if a.is_cuda and a.numel() and b.numel():
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
