"""AdamW's update of one parameter in plain PyTorch, which defines what the kernel computes, and state in fewer bits.

    g = gradient * factor
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    w = w - w * (lr * weight decay)
    w = w - m * (lr / (1 - beta1^t)) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)

That is AdamW (Loshchilov and Hutter, arXiv 1711.05101), with the operations of `torch.optim.AdamW(fused=True)`. Each is
rounded to float32 by itself. The update uses m and v before they are rounded to what is kept of them.

State in fewer bits is of two kinds: moments, and the low halves of float32 masters of bfloat16 weights.

**Masters.** A bfloat16 weight and 16 more bits are a float32 master: no second copy of the weights. The weight that the
model sees is the master rounded to the nearest bfloat16. The optimizer keeps how far, in units of float32's last bit,
as a signed int16:

    master   0x3F80_9000     1.0044...
    weight   0x3F81          the nearest, here above the master
    low     -0x7000          0x3F81_0000 - 0x7000 = 0x3F80_9000

Halfway cases round away from zero and not to even: then `low` lies in [-0x8000, 0x7FFF] and fits exactly (to even, the
same 16 bits would stand for two masters). NVIDIA Apex's distributed Adam does so (`store_param_remainders`); the idea
is of Split-SGD-BF16, arXiv 2005.04680, section 5. A NaN is kept as the one bfloat16 NaN, whatever its bits were.

Before the first step `low` is 0: the master is the weight.

**Moments.**

    float32     8 bytes a parameter for both; exact
    bfloat16    4 bytes; lossy
    int8        2 bytes, and 8 for each block of 256; lossy

**bfloat16.** The first moment is rounded to nearest. The second is rounded stochastically: with beta2 = 0.999 it
changes by at most a thousandth in a step that has no gradient, which is less than half of bfloat16's last bit (1/512),
so that rounding to nearest would leave it where it is for ever. Stochastic rounding is right on average. Its random
bits are a hash of (step, parameter, element), so that the same run has the same bits, also after a resume.

**int8.** Block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
2110.02861, section 2), as in bitsandbytes and torchao. A block of 256 values is divided by its largest magnitude, and
each quotient becomes the nearest of 256 values that lie densely around 0. Those of the second moment have no sign:

    exponent  values between      unsigned: equal steps, whose middles they are      signed
    6         0.1 and 1           128                                                64 on either side
    5         0.01 and 0.1        64                                                 32
    ...
    0         1e-7 and 1e-6       2                                                  1
    and 0 and 1

One thing differs from both libraries: a second moment that is not 0 does not become 0, because an update divides by it.
A block is a piece of the last dimension of a parameter: rows of experts, and shards of dimension 0, have blocks of
their own. Parameters that are small (under 4096 elements, as there) or have one dimension keep float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK = 256
NAN_BITS = 0x7FC00000
LEAST_ELEMENTS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
_WORD = 0xFFFFFFFF


# A code has a distance from that of 0, in which every decade is one power of two:
#
#     exponent k of the distance    -1   0              1          ...   6          7
#     distance (signed)              0   1              2, 3             64 to 127  128
#     values                         0   1e-7 to 1e-6   to 1e-5          to 1       1
#
# Codes without a sign have distances of one exponent more. The kernel makes a code by the
# arithmetic of `quantise`, with the same roundings (`kernel._code`).
DECADES = 7
# Of float32: what makes a number from 1 to 10 one from 1 to 2.
NINTH, EIGHT_NINTHS, BELOW_2 = float(torch.tensor(1 / 9)), float(torch.tensor(8 / 9)), 2 - 2.0**-23
# Of a block's largest value, the smallest normal float32: what is much smaller has no inverse. Such a block becomes 0.
LEAST_SCALE = 2.0**-126


@functools.cache
def tops() -> torch.Tensor:
    """Of each decade the value with which it ends, by k + 1: (9,) float32 on the CPU."""
    found = torch.zeros(DECADES + 2, dtype=torch.float64)
    found[1:-1] = 10.0 ** torch.arange(1 - DECADES, 1, dtype=torch.float64)
    return found.float()


def _values(codes: torch.Tensor, signed: bool) -> torch.Tensor:
    """float32 values of integer codes."""
    middle = ((codes - 127).abs() if signed else codes + 1) + 0.5
    mantissa, exponent = torch.frexp(middle)
    top = tops().to(codes.device)[exponent if signed else exponent - 1]
    value = torch.where(codes == 255, 1.0, (2 * mantissa * 0.9 - 0.8) * top)
    return torch.where(codes < 127, -value, value) if signed else value


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of a code, ascending, float32 on the CPU."""
    return _values(torch.arange(256), signed)


@functools.cache
def thresholds(signed: bool) -> torch.Tensor:
    """From which magnitude on a value is nearer to the next decade, to the first one after 0, and to 1 after the
    last: (8,) float32 on the CPU."""
    ends = (127 if signed else 0) + 2 ** torch.arange(DECADES + 1) * (1 if signed else 2) - (1 if signed else 2)
    values = dynamic_map(signed)
    return (values[ends] + values[ends + 1]) / 2


# Of an element that is 0.
ZERO_CODE = {True: 127, False: 0}


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the blocks' largest magnitudes, for a parameter of this shape."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def quantise(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, the shape of `values`) and each block's largest magnitude (float32, `scale_shape`)."""
    width, blocks = values.shape[-1], scale_shape(values.shape)[-1]
    padded = torch.nn.functional.pad(values.float(), (0, blocks * BLOCK - width)).unflatten(-1, (blocks, BLOCK))
    scale = padded.abs().amax(-1)
    quotient = padded * (1 / torch.where(scale >= LEAST_SCALE, scale, 1.0)).unsqueeze(-1)
    magnitude, bounds = quotient.abs(), thresholds(signed).tolist()
    # Halves of what is left until one decade is; that ends at 10 then.
    low4 = magnitude < bounds[4]
    low2 = magnitude < torch.where(low4, bounds[2], bounds[6])
    low1 = magnitude < torch.where(
        low4, torch.where(low2, bounds[1], bounds[3]), torch.where(low2, bounds[5], bounds[7])
    )
    ratio = torch.where(low4, 1e4 * NINTH, NINTH)
    ratio = torch.where(low2, ratio * 1e2, ratio)
    ratio = torch.where(low1, ratio * 10, ratio)
    share = (magnitude * ratio + EIGHT_NINTHS).clamp(1.0, BELOW_2)
    # Its first bits, behind the one that is not written, are the distance.
    bits = share.view(torch.int32) - (126 << 23)
    distance = bits >> (16 if signed else 15) + 4 * low4.int() + 2 * low2.int() + low1.int()
    if signed:
        distance = torch.where(magnitude < bounds[0], 0, distance)
        codes = torch.where(quotient < 0, 127 - distance.clamp(max=127), 127 + distance)
    else:
        codes = torch.where(padded > 0, distance - 1, 0)
    return codes.to(torch.uint8).flatten(-2)[..., :width], scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """The float32 values that codes stand for."""
    return _values(codes.int(), signed) * scale.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]


def mix(x: torch.Tensor | int) -> torch.Tensor | int:
    """A hash of 32-bit words (held in 64 bits): "lowbias32" of C. Wellons, hash-prospector."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def noise(numel: int, step: int, number: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """16 random bits for each of some elements of a parameter in a step. int32, `(numel,)`.

    Args:
        number: of the parameter among the optimizer's.
        first: of the elements.
    """
    key = mix((step * 0x9E3779B9 + number * 0x85EBCA6B) & _WORD)
    element = torch.arange(first, first + numel, device=device) & _WORD
    mixed = mix(element ^ key)
    assert isinstance(mixed, torch.Tensor)
    return (mixed & 0xFFFF).int()


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float32 values that are not negative, as bfloat16: up with the probability of what is cut off."""
    return ((values.view(torch.int32) + noise.view_as(values)) >> 16).short().view(torch.bfloat16)


def can_be_blocks(shape: Sequence[int], last_dim_shards: int = 1) -> bool:
    """Whether a parameter of this (global) shape has its moments in int8."""
    if len(shape) < 2 or math.prod(shape) < LEAST_ELEMENTS:
        return False
    return last_dim_shards == 1 or shape[-1] % (last_dim_shards * BLOCK) == 0


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 masters of bfloat16 weights and their int16 low bits; all of one shape."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and int16 low bits of float32 masters, exactly."""
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), NAN_BITS, bits)
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    return upper.short().view(torch.bfloat16), low.short()


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
