"""Adam's two moments in fewer bits than float32.

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

import torch

BLOCK = 256
LEAST_ELEMENTS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
_WORD = 0xFFFFFFFF


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of a code, ascending, float32 on the CPU."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent * (1 if signed else 2) + 1)
        middles = (10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += middles
        if signed:
            values += [-middle for middle in middles]
    return torch.tensor(sorted(values), dtype=torch.float32)


@functools.cache
def midpoints(signed: bool) -> torch.Tensor:
    """255 bounds: a quotient gets the number of bounds that are not above it as its code."""
    values = dynamic_map(signed)
    return (values[:-1] + values[1:]) / 2


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
    quotient = padded / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    codes = torch.bucketize(quotient, midpoints(signed).to(values.device), right=True)
    if not signed:
        codes = torch.where(padded > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2)[..., :width], scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """The float32 values that codes stand for."""
    values = dynamic_map(signed).to(codes.device)[codes.long()]
    return values * scale.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]


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
