"""AdamW's update of one parameter in plain PyTorch. It defines what the kernel computes, operation by operation.

    g = gradient * factor
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    w = w - w * (lr * weight decay)
    w = w - m * (lr / (1 - beta1^t)) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)

That is AdamW (Loshchilov and Hutter, arXiv 1711.05101), with the operations of `torch.optim.AdamW(fused=True)`. Each is
rounded to float32 by itself. The update uses m and v before they are rounded to what is kept of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from carpool.optim.state_bits import dequantise, join, noise, quantise, round_stochastically, split


class Coefficients(NamedTuple):
    """The numbers of one parameter's update: float32 values, worked out in float64."""

    step_size: float  # lr / (1 - beta1^t)
    inverse_root: float  # 1 / sqrt(1 - beta2^t)
    decay: float  # lr * weight decay
    take1: float  # 1 - beta1
    keep2: float  # beta2
    take2: float  # 1 - beta2
    eps: float


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    coefficients: Coefficients,
    factor: float,
    step: int,
    number: int,
    first: int = 0,
) -> None:
    """Update a parameter, or a part of it, and its state in place. Local, contiguous tensors.

    Args:
        weight: float32 or bfloat16.
        grad: float32 or bfloat16, in the weight's shape.
        state: exp_avg, exp_avg_sq; low_bits for a bfloat16 weight; exp_avg_scale, exp_avg_sq_scale for int8 moments.
        factor: for the gradient.
        step: of this update, from 1. With `number`, of the parameter among the optimizer's, it seeds stochastic
        rounding.
        first: element of the parameter with which the part begins.
    """
    c = coefficients
    masters = "low_bits" in state
    w = join(weight, state["low_bits"]) if masters else weight
    g = grad.float()
    if factor != 1.0:
        g = g * factor
    kept_m, kept_v = state["exp_avg"], state["exp_avg_sq"]
    if kept_m.dtype == torch.uint8:
        m = dequantise(kept_m, state["exp_avg_scale"], signed=True)
        v = dequantise(kept_v, state["exp_avg_sq_scale"], signed=False)
    else:
        m, v = kept_m.float(), kept_v.float()
    m.add_((g - m).mul_(c.take1))
    v.mul_(c.keep2).add_((g * g).mul_(c.take2))
    w.sub_(w * c.decay)
    w.sub_((m * c.step_size).div_(v.sqrt().mul_(c.inverse_root).add_(c.eps)))
    if masters:
        for target, value in zip((weight, state["low_bits"]), split(w), strict=True):
            target.copy_(value)
    if kept_m.dtype == torch.uint8:
        for name, value, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
            codes, scale = quantise(value, signed)
            state[name].copy_(codes)
            state[f"{name}_scale"].copy_(scale)
    elif kept_m.dtype == torch.bfloat16:
        kept_m.copy_(m)
        kept_v.copy_(round_stochastically(v, noise(v.numel(), step, number, v.device, first)))
