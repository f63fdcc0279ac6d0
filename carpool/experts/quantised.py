"""Frozen matrices in 4 or 8 bits, and back: the base of QLoRA (Dettmers et al., arXiv 2305.14314).

    nf4     a value is one of 16 levels times the largest magnitude of its block of 64 in a row; these magnitudes are
            themselves kept in 8 bits (double quantisation): 4.13 bits
    mxfp4   a value is one of 16 numbers of 4 bits times a power of two of its block of 32 inputs: 4.25 bits. So is
            gpt-oss published (OCP Microscaling 1.0), and its files are kept as they are
    int8    a value is a whole number from -127 to 127, times the largest magnitude of its row / 127: 8 bits

    row 0.5 -2 1 ...     largest magnitude 2; 0.25 -1 0.5 -> nearest levels 0.2461 -1 0.4407 -> codes 10 0 12

A row is one of the memory's, so in nf4 and int8 experts stored (in, out) have blocks along their outputs; in mxfp4 rows
are outputs always. Two codes of 4 bits share a byte; the first is in the upper half in nf4, in the lower in mxfp4.

Magnitudes of nf4, m of all G blocks of a matrix, are kept as 8-bit codes of m - mean(m), with a float32 scale for each
256 of them:

    scale    G codes, 0 to 3 bytes that mean nothing, G / 256 scales, the mean       one run of bytes for each matrix

nf4 and int8 are what bitsandbytes keeps (`quantize_4bit` with `compress_statistics`, `int8_vectorwise_quant`), bit by
bit but for how the mean is rounded, which tests check.

Matrices of a stack are quantised alone, so codes of experts do not depend on how these are sharded.

A product dequantises a layer's matrices right before it reads them, forward and backward, and lets them go: experts
without rows are left out, and `AT_ONCE` elements are there at a time, with a product for each such part of the experts.
In a step that takes as long as writing and reading the matrices once more, which does not grow with the tokens.
Dequantising each tile inside the product reads less, but does it again for every 128 rows of an expert, between the
products of tensor cores and not beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from carpool.experts import pairs as sides
from carpool.experts.base import ExpertWeights

Kind = Literal["nf4", "mxfp4", "int8"]
BLOCK = {"nf4": 64, "mxfp4": 32}
SUPERBLOCK = 256  # magnitudes of nf4 that share a scale
# Quantiles of a normal distribution (QLoRA, appendix E), as bitsandbytes has them.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Of 4 bits: a sign, two of exponent, one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PIECE = 2**22  # elements of a matrix that are quantised, or on CPUs dequantised, at a time
# Elements that are there at a time, dequantised, if one matrix has no more: 256 MiB in bfloat16.
AT_ONCE = 2**27
STEP = 7.874015718698502e-3  # bitsandbytes' 1 / 127


class Quantised(NamedTuple):
    """A stack of matrices.

    Attributes:
        code: (S, A, B / 2) uint8, (S, A, B) int8 in int8. In mxfp4 A are outputs, whichever way the matrices lie.
        scale: of nf4 (S, bytes) uint8, see the module's docstring; of mxfp4 (S, A, B / 32) uint8, exponents + 127; of
            int8 (S, A, 1) float32, the largest magnitude of a row.
    """

    code: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.code.nbytes + self.scale.nbytes


def kind_of(scale: torch.Tensor) -> Kind:
    """How something is quantised, by its scales."""
    return "int8" if scale.dtype == torch.float32 else "nf4" if scale.dim() == 2 else "mxfp4"


def why_not(kind: Kind, shape: Sequence[int]) -> str | None:
    """Why matrices of this shape cannot be quantised so; None: they can."""
    if kind != "int8" and shape[-1] % BLOCK[kind]:
        return (
            f"{kind} has blocks of {BLOCK[kind]} values of a row, and rows of {tuple(shape)} do not divide into these"
        )
    return None


def quantised_bytes(kind: Kind, shape: Sequence[int]) -> int:
    """Of a stack of matrices, codes and scales."""
    elements, rows = math.prod(shape), math.prod(shape[:-1])
    if kind == "int8":
        return elements + rows * 4
    if kind == "mxfp4":
        return elements // 2 + elements // BLOCK[kind]
    matrices = math.prod(shape[:-2])
    return elements // 2 + matrices * _statistics(elements // BLOCK[kind] // max(1, matrices))[1]


def _statistics(groups: int) -> tuple[int, int]:
    """Of the bytes of nf4's scales of a matrix with so many blocks: where floats begin, and how many there are."""
    first = -(-groups // 4) * 4
    return first, first + 4 * (-(-groups // SUPERBLOCK) + 1)


def parts_of_scale(scale: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of nf4's scales, views: (S, groups) codes, and (S, groups / 256 + 1) float32, of which the mean is the last."""
    return scale[:, :groups], scale[:, _statistics(groups)[0] :].view(torch.float32)


@torch.no_grad()
def quantise(weight_SAB: torch.Tensor, kind: Kind) -> Quantised:
    """Codes and scales, one matrix after another. In mxfp4 rows are to be outputs.

    Raises:
        ValueError: a shape that cannot be quantised so."""
    if why := why_not(kind, weight_SAB.shape):
        raise ValueError(why)
    slots, rows, width = weight_SAB.shape
    packed, dtype = (width, torch.int8) if kind == "int8" else (width // 2, torch.uint8)
    code = torch.empty(slots, rows, packed, dtype=dtype, device=weight_SAB.device)
    shape: tuple[int, ...] = (slots, rows, 1)
    if kind == "nf4":
        shape = slots, _statistics(rows * width // BLOCK[kind])[1]
    elif kind == "mxfp4":
        shape = slots, rows, width // BLOCK[kind]
    scale = torch.zeros(shape, dtype=torch.float32 if kind == "int8" else torch.uint8, device=weight_SAB.device)
    # An embedding is large, and all this takes several times its memory.
    piece = max(1, PIECE // max(1, width))
    for slot in range(slots):
        largest = []
        for first in range(0, rows, piece):
            part = slice(first, first + piece)
            code[slot, part], of_part = _TO[kind](weight_SAB[slot, part].contiguous())
            if kind == "nf4":
                largest.append(of_part.flatten())
            else:
                scale[slot, part] = of_part
        if largest:
            _keep_statistics(torch.cat(largest), scale[slot : slot + 1])
    return Quantised(code, scale)


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)


def _to_blocks(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    # bitsandbytes multiplies by the reciprocal.
    return (values * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)


def _to_nf4(weight_AB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight_AB.float().unflatten(-1, (-1, BLOCK["nf4"]))
    largest = blocks.abs().amax(-1)
    code = _nearest(_to_blocks(blocks, largest), tables_of("nf4", weight_AB.device)[:16])
    return (code[..., ::2] << 4 | code[..., 1::2]).flatten(-2), largest


def _keep_statistics(largest: torch.Tensor, scale: torch.Tensor) -> None:
    """Put the magnitudes of all blocks of a matrix into the bytes of its scales."""
    # In float64 the mean does not depend on the order, so that all devices find the same.
    mean = largest.mean(dtype=torch.float64).float()
    codes, floats = (part[0] for part in parts_of_scale(scale, len(largest)))
    around = largest - mean
    wide = F.pad(around, (0, -len(around) % SUPERBLOCK)).view(-1, SUPERBLOCK)
    floats[:-1], floats[-1] = wide.abs().amax(-1), mean
    table = tables_of("nf4", largest.device)[16:]
    codes.copy_(_nearest(_to_blocks(wide, floats[:-1]), table).flatten()[: len(around)])


def _to_mxfp4(weight_AB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two scales for a block, the largest value's and twice that, the one whose squared errors are smaller."""
    blocks = weight_AB.float().unflatten(-1, (-1, BLOCK["mxfp4"]))
    largest = blocks.abs().amax(-1)
    # 6 = 1.5 * 2**2 is the largest number; `frexp` has mantissas below 1.
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, -127).clamp(-127, 124)
    code, error = _fp4(blocks, exponent)
    other, others_error = _fp4(blocks, exponent + 1)
    doubled = 4 * others_error < error  # in units of the scale
    code = torch.where(doubled.unsqueeze(-1), other, code)
    return (code[..., ::2] | code[..., 1::2] << 4).flatten(-2), (exponent + doubled + 127).to(torch.uint8)


def _fp4(blocks: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of blocks with a scale, and the squared error of each block in units of the scale."""
    numbers = torch.tensor(FP4, device=blocks.device)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    code = _nearest(scaled.abs(), numbers)
    error = (F.embedding(code.int(), numbers.unsqueeze(1)).squeeze(-1) - scaled.abs()).square().sum(-1)
    return code | (scaled < 0).to(torch.uint8) << 3, error


def _to_int8(weight_AB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight_AB.abs().amax(-1, keepdim=True).float()
    code = torch.round(weight_AB * (127.0 / scale)).to(torch.int8)
    return torch.where(scale == 0, 0, code), scale  # of a row of zeros the quotient is no number


_TO = {"nf4": _to_nf4, "mxfp4": _to_mxfp4, "int8": _to_int8}


def dequantise(
    code: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    offsets_S: torch.Tensor | None = None,
    rows: slice = slice(None),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(S, A, B), in float32 and rounded once to `dtype`.

    Args:
        offsets_S: where each slot's rows end. On GPUs matrices of slots without rows are then left as they are in
            memory, for nobody reads them.
        rows: of A, the rows that are wanted, at a stretch.
        out: of at least as many matrices; these are then in its memory.
    """
    kind = kind_of(scale)
    width = code.shape[2] * (1 if kind == "int8" else 2)
    begin, end, _ = rows.indices(code.shape[1])
    if out is None:
        out = torch.empty(len(code), end - begin, width, dtype=dtype, device=code.device)
    out = out[: len(code)]
    if sides.on_gpu(code):
        from carpool.experts import quantised_kernels

        group = width if kind == "int8" else BLOCK[kind]
        scales = parts_of_scale(scale, code.shape[1] * width // group) if kind == "nf4" else (scale, scale)
        tables = scale if kind == "int8" else tables_of(kind, code.device)
        quantised_kernels.dequantise(code, scales, tables, offsets_S, out, kind, group, SUPERBLOCK, STEP, begin)
        return out
    piece = max(1, PIECE // max(1, width))
    for slot, code_AC in enumerate(code):
        largest = _largest(scale[slot : slot + 1], code_AC.shape, kind)[0]
        for first in range(begin, end, piece):
            part = slice(first, min(first + piece, end))
            out[slot, first - begin : part.stop - begin] = _values(code_AC[part], largest[part], kind)
    return out


def by_rows(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their values) of a stack of one matrix, `AT_ONCE` elements at a time; products like multiples of 128."""
    number, width = code.shape[1], code.shape[2] * (1 if kind_of(scale) == "int8" else 2)
    each = max(128, AT_ONCE // width // 128 * 128)
    for rows in (slice(first, min(first + each, number)) for first in range(0, number, each)):
        yield rows, dequantise(code, scale, dtype, rows=rows)[0]


def dequantised_rows(code: torch.Tensor, scale: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a stack of one matrix, (*index, B): of an embedding. Plain operations of PyTorch on any device."""
    kind, groups = kind_of(scale), 2 * code.shape[2] // BLOCK["nf4"]
    if kind == "nf4":
        of_row = index.unsqueeze(-1) * groups + torch.arange(groups, device=index.device)
        codes, floats = parts_of_scale(scale, code.shape[1] * groups)
        largest = _of_statistics(codes[0][of_row], floats[0][of_row // SUPERBLOCK], floats[0, -1])
    else:
        largest = _largest(scale[:, index.flatten()], code.shape[1:], kind).view(*index.shape, -1)
    return _values(code[0][index], largest, kind).to(dtype)


def _largest(scale: torch.Tensor, shape: Sequence[int], kind: Kind) -> torch.Tensor:
    """(S, rows, groups) float32: what each group's values are multiplied by. `shape`: of a matrix's codes."""
    if kind == "nf4":
        groups = 2 * math.prod(shape) // BLOCK[kind]
        codes, floats = parts_of_scale(scale, groups)
        scales = floats[:, :-1].repeat_interleave(SUPERBLOCK, 1)[:, :groups]
        return _of_statistics(codes, scales, floats[:, -1:]).view(len(scale), shape[0], -1)
    if kind == "mxfp4":
        # As bits of a float32; 2**-127 has no leading one.
        return torch.where(scale == 0, 0x400000, scale.int() << 23).view(torch.float32)
    return scale


def _of_statistics(codes: torch.Tensor, scales: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    # In float64 there is one rounding, whether or not a device multiplies and adds at once.
    table = tables_of("nf4", codes.device)[16:]
    return (F.embedding(codes.int(), table.unsqueeze(1)).squeeze(-1).double() * scales.double() + mean.double()).float()


def _values(code: torch.Tensor, largest: torch.Tensor, kind: Kind) -> torch.Tensor:
    """(..., B) float32 of (..., B / 2) or (..., B) codes, and (..., groups) magnitudes."""
    if kind == "int8":
        return code * largest * STEP
    level = tables_of(kind, code.device)[:16]
    of_both = level.repeat_interleave(16), level.repeat(16)  # of each byte: of its upper half, and of its lower
    pairs = torch.stack(of_both if kind == "nf4" else of_both[::-1], 1)
    values = F.embedding(code.int(), pairs).view(*largest.shape, BLOCK[kind])
    return (values * largest.unsqueeze(-1)).flatten(-2)


@cache
def tables_of(kind: Kind, device: torch.device) -> torch.Tensor:
    """The 16 values of codes on a device, and behind those of nf4 the 256 of magnitudes: bitsandbytes' dynamic map
    (Dettmers et al., arXiv 2110.02861). A constant."""
    with torch.inference_mode(False):
        if kind == "mxfp4":
            return torch.tensor((*FP4, *(-value for value in FP4)), device=device)
        found = [0.0, 1.0]
        for i in range(7):
            bounds = torch.linspace(0.1, 1, 2**i + 1)
            means = 10 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)
            found += [*means.tolist(), *(-means).tolist()]
        return torch.tensor((*LEVELS, *sorted(found)), device=device)


def dequantised(weights: ExpertWeights) -> ExpertWeights:
    """The same with all matrices in memory; of weights that are not quantised, themselves."""
    if not weights.quantised:
        return weights
    codes: tuple[Any, ...] = weights[-4:]
    up_SFH, down_SHF = (dequantise(code, scale, weights.up_SFH.dtype) for code, scale in (codes[:2], codes[2:]))
    return ExpertWeights.of((up_SFH, down_SHF, *weights[2:-4]))
