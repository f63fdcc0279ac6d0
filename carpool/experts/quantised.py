"""Frozen matrices of experts in 4 or 8 bits, and back: the base of QLoRA (Dettmers et al., arXiv 2305.14314).

    nf4     a value is one of 16 levels times the largest magnitude of its block of 64 in a row: 4.5 bits
    int8    a value is a whole number from -127 to 127, times the largest magnitude of its row / 127: 8 bits

    row 0.5 -2 1 ...     largest magnitude 2; 0.25 -1 0.5 -> nearest levels 0.2461 -1 0.4407 -> codes 10 0 12

A row is one of the memory's, so experts stored (in, out) have blocks along their outputs. Two codes of nf4 share a
byte, the first in its upper half; scales are float32. Both are what bitsandbytes keeps (`quantize_4bit` without nested
statistics, `int8_vectorwise_quant`), bit by bit, which tests check. torchao's NF4 has the same levels and blocks, and
rounds the scales once more (QLoRA's double quantisation: 0.4 bits a value less).

Rows of experts are quantised alone, so codes do not depend on how experts are sharded.

A product dequantises a layer's matrix right before it reads it, forward and backward, and lets it go: experts without
rows are left out, and the most that there is at a time is one matrix of one layer. In a step that takes as long as
writing and reading the matrix once more, which does not grow with the tokens. Dequantising each tile inside the product
reads less, but does it again for every 128 rows of an expert, between the products of tensor cores and not beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from carpool.experts import pairs as sides
from carpool.experts.base import ExpertWeights

Kind = Literal["nf4", "int8"]
BLOCK = 64
# Quantiles of a normal distribution (QLoRA, appendix E), as bitsandbytes has them.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127


class Quantised(NamedTuple):
    """A stack of matrices.

    Attributes:
        code: (S, A, B / 2) uint8 in nf4, (S, A, B) int8 in int8.
        scale: (S, A, B / 64) or (S, A, 1) float32, the largest magnitude of a block or a row.
    """

    code: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.code.nbytes + self.scale.nbytes


def why_not(kind: Kind, shape: Sequence[int]) -> str | None:
    """Why matrices of this shape cannot be quantised so; None: they can."""
    if kind == "nf4" and shape[-1] % BLOCK:
        return f"nf4 has blocks of {BLOCK} values of a row, and rows of {tuple(shape)} do not divide into these"
    return None


def quantised_bytes(kind: Kind, shape: Sequence[int]) -> int:
    """Of a stack of matrices, codes and scales."""
    elements, rows = math.prod(shape), math.prod(shape[:-1])
    return elements // 2 + elements // BLOCK * 4 if kind == "nf4" else elements + rows * 4


@torch.no_grad()
def quantise(weight_SAB: torch.Tensor, kind: Kind) -> Quantised:
    """Codes and scales, one expert after another.

    Raises:
        ValueError: a shape that cannot be quantised so."""
    if why := why_not(kind, weight_SAB.shape):
        raise ValueError(why)
    slots, rows, width = weight_SAB.shape
    packed, dtype, groups = (width // 2, torch.uint8, width // BLOCK) if kind == "nf4" else (width, torch.int8, 1)
    code = torch.empty(slots, rows, packed, dtype=dtype, device=weight_SAB.device)
    scale = torch.empty(slots, rows, groups, dtype=torch.float32, device=weight_SAB.device)
    for slot, weight_AB in enumerate(weight_SAB):
        if kind == "nf4":
            code[slot], scale[slot] = _to_nf4(weight_AB)
        else:
            code[slot], scale[slot] = _to_int8(weight_AB)
    return Quantised(code, scale)


def _to_nf4(weight_AB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight_AB.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1)
    # bitsandbytes multiplies by the reciprocal.
    scaled = (blocks * (1.0 / scale.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    level = torch.tensor(LEVELS, device=blocks.device)
    code = torch.bucketize(scaled, (level[1:] + level[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (code[..., ::2] << 4 | code[..., 1::2]).flatten(-2), scale


def _to_int8(weight_AB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight_AB.abs().amax(-1, keepdim=True).float()
    code = torch.round(weight_AB * (127.0 / scale)).to(torch.int8)
    return torch.where(scale == 0, 0, code), scale  # of a row of zeros the quotient is no number


def dequantise(
    code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offsets_S: torch.Tensor | None = None
) -> torch.Tensor:
    """(S, A, B), in float32 and rounded once to `dtype`.

    Args:
        offsets_S: where each slot's rows end. On GPUs matrices of slots without rows are then left as they are in
            memory, for nobody reads them.
    """
    if sides.on_gpu(code):
        from carpool.experts import quantised_kernels

        return quantised_kernels.dequantise(code, scale, dtype, offsets_S, levels(code.device), BLOCK, STEP)
    nf4, level = code.dtype == torch.uint8, torch.tensor(LEVELS)
    pairs = torch.stack((level.repeat_interleave(16), level.repeat(16)), 1)  # of each byte
    out = torch.empty(*code.shape[:2], code.shape[2] * (2 if nf4 else 1), dtype=dtype, device=code.device)
    for slot, (code_AC, scale_AG) in enumerate(zip(code, scale, strict=True)):
        if nf4:
            values = F.embedding(code_AC.int(), pairs).view(*scale_AG.shape, BLOCK)
            out[slot] = (values * scale_AG.unsqueeze(-1)).flatten(-2)
        else:
            out[slot] = code_AC * scale_AG * STEP
    return out


@cache
def levels(device: torch.device) -> torch.Tensor:
    """`LEVELS` on a device, where kernels look them up. A constant."""
    with torch.inference_mode(False):
        return torch.tensor(LEVELS, device=device)


def dequantised(weights: ExpertWeights) -> ExpertWeights:
    """The same with all matrices in memory; of weights that are not quantised, themselves."""
    if not weights.quantised:
        return weights
    matrices = {}
    for name, code, scale in (("up_SFH", weights.up_code, weights.up_scale), ("down_SHF", *weights[-2:])):
        assert code is not None and scale is not None
        matrices[name] = dequantise(code, scale, weights.up_SFH.dtype)
    return weights._replace(**matrices, up_code=None, up_scale=None, down_code=None, down_scale=None)
