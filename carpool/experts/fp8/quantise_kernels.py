"""The CUDA side of `carpool.experts.fp8.fp8_products`, besides the products: weights to codes, packets to rows, and
back through the activation.

    quantise_weight     one program per block of 128 x 128: read once, scaled, written once, in the order that the
                        products want; turning is a transposition of a block in registers
    gather_wide         each pair's packet to a row for the weights' gradients: H bytes in, 2 H out
    activate_backward   h, dA -> dh as codes for dx = dh @ up, and wide for up's gradient; weight * a; sum(dA * a)

The last two are persistent over the pairs that there are: see pair_kernels.py. Quantising weights is bound by memory:
in bf16, 2 bytes in and 1 out of each element, in the forward and again, turned, in the backward. Where codes are held
until the backward, both orders are written from one reading: 264 us for 268 M weights on an H200, not 187 and 189.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.experts.activation_kernels import _slopes, constants
from carpool.experts.base import Activation
from carpool.experts.fp8.gemm_kernels import _write_group
from carpool.experts.pair_kernels import programs
from carpool.kernels import GROUP
from carpool.kernels.packets import FP8, scales_at
from carpool.kernels.quick import cdiv, power_of_2, quick


@quick
@triton.jit
def _quantise_weight(  # type: ignore[no-untyped-def]
    weight, slot_stride, row_stride, column_stride, code, scale, turned, turned_scale, F: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STRAIGHT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """weight: (S, PARTS * F, COLUMNS) by strides. code: (S, N, K); turned: (S, K, N). One block per program."""
    across: tl.constexpr = K // 128
    down: tl.constexpr = N // 128
    block = tl.program_id(0)
    slot = (block // (across * down)).to(tl.int64)
    n, k = block // across % down, block % across
    row, column = n * 128 + tl.arange(0, 128), k * 128 + tl.arange(0, 128)
    part, inner = row // (N // PARTS), row % (N // PARTS)
    source = inner * PARTS + part if INTERLEAVED else part * F + inner
    inside = (inner < F)[:, None] & (column < COLUMNS)[None, :]
    at = source.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    value = tl.load(weight + slot * slot_stride + at, mask=inside, other=0.0).to(tl.float32)
    own = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), 1e-30) / 448.0
    result = (value * (1.0 / own)).to(tl.float8e4nv)
    if STRAIGHT:
        tl.store(code + slot * (N * K) + row[:, None] * K + column[None, :], result)
        tl.store(scale + slot * (down * across) + n * across + k, own)
    if TURNED:
        tl.store(turned + slot * (N * K) + column[:, None] * N + row[None, :], tl.trans(result))
        tl.store(turned_scale + slot * (down * across) + k * down + n, own)


@quick
@triton.jit
def _gather_wide(  # type: ignore[no-untyped-def]
    rows, start, home, order, offsets, out, slots, slab, home_row, home_rows, J: tl.constexpr, H: tl.constexpr,
    PACKET: tl.constexpr, SCALES_AT: tl.constexpr, HAS_START: tl.constexpr, HAS_HOME: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    count = tl.load(offsets + slots - 1)
    chunks: tl.constexpr = (H + GROUPS * 128 - 1) // (GROUPS * 128)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS) * chunks, tl.num_programs(0)):
        pair = (tile // chunks) * ROWS + tl.arange(0, ROWS)
        group = (tile % chunks) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        row = tl.load(order + pair, mask=pair < count, other=0) // J
        away = pair < count
        if HAS_HOME:
            at_home = away & (row >= home_row) & (row < home_row + home_rows)
            away = away & (row < home_row)
        at = row.to(tl.int64) * PACKET
        if HAS_START:
            begin = tl.load(start + row // slab, mask=away, other=-1)
            away = away & (begin >= 0)
            at = tl.multiple_of(begin, 16) + (row % slab).to(tl.int64) * PACKET
        value = _widen(rows, at, away, group, column, H, SCALES_AT)
        if HAS_HOME:
            own = (row - home_row).to(tl.int64) * PACKET
            value = tl.where(at_home[:, None, None], _widen(home, own, at_home, group, column, H, SCALES_AT), value)
        to = out + pair.to(tl.int64)[:, None, None] * H + column[None, :, :]
        mask = (pair < count)[:, None, None] & (column < H)[None, :, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _widen(rows, at, there, group, column, H: tl.constexpr, SCALES_AT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, GROUPS, 128) float32 of the packets that begin at these bytes; zero where there is none."""
    at = tl.multiple_of(at, 16)
    codes = rows.to(tl.pointer_type(tl.float8e4nv)) + at[:, None, None] + column[None, :, :]
    code = tl.load(codes, mask=there[:, None, None] & (column < H)[None, :, :], other=0.0)
    scales = (rows + at + SCALES_AT).to(tl.pointer_type(tl.float32))[:, None] + group[None, :]
    scale = tl.load(scales, mask=there[:, None] & (group * 128 < H)[None, :], other=0.0)
    return code.to(tl.float32) * scale[:, :, None]


@quick
@triton.jit
def _activate_backward(  # type: ignore[no-untyped-def]
    h, start, d, weight, dy, bias, order, slot, offsets, code, scale, wide, scaled, dweight, slots, F: tl.constexpr,
    FP: tl.constexpr, W: tl.constexpr, H: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    count = tl.load(offsets + slots - 1)
    if HAS_START:
        begin = tl.load(start)
        count = tl.where(begin < 0, 0, count)
        h += tl.multiple_of(begin, 16)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        pair = tile * ROWS + tl.arange(0, ROWS)
        live = pair < count
        row = pair.to(tl.int64)
        entry = tl.load(order + pair, mask=live, other=0)
        factor = tl.load(weight + entry, mask=live, other=0.0).to(tl.float32)[:, None]
        total = tl.zeros((ROWS, 128), tl.float32)
        for group in range(0, FP // 128):
            column = group * 128 + tl.arange(0, 128)
            at = row[:, None] * W + column[None, :]
            gate = tl.load(h + at, mask=live[:, None], other=0.0).to(tl.float32)
            up = gate
            if GATED:
                up = tl.load(h + at + FP, mask=live[:, None], other=0.0).to(tl.float32)
            grad = tl.load(d + row[:, None] * FP + column[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            value, dgate, dup = _slopes(gate, up, grad * factor, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            total += grad * value
            _write_group(code, scale, dgate, row, live, group, W)
            if WIDE:
                tl.store(wide + at, dgate.to(wide.dtype.element_ty), mask=live[:, None])
                mask = live[:, None] & (column < F)[None, :]
                to = scaled + row[:, None] * F + column[None, :]
                tl.store(to, (value * factor).to(scaled.dtype.element_ty), mask=mask)
            if GATED:
                _write_group(code, scale, dup, row, live, FP // 128 + group, W)
                if WIDE:
                    tl.store(wide + at + FP, dup.to(wide.dtype.element_ty), mask=live[:, None])
        if HAS_BIAS:
            own = tl.load(slot + entry, mask=live, other=0).to(tl.int64)
            for group in range(0, (H + 127) // 128):
                column = group * 128 + tl.arange(0, 128)
                mask = live[:, None] & (column < H)[None, :]
                grad = tl.load(dy + row[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
                total += grad * tl.load(bias + own[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dweight + entry, tl.sum(total, 1).to(dweight.dtype.element_ty), mask=live)


def quantise_weight(
    weight_SOI: torch.Tensor, parts: int, inner: int, interleaved: bool, straight: bool, turned: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """((code, scale), (code, scale) turned) of `carpool.experts.fp8.fp8_products.quantise_weight`, where asked for."""
    slots, _, columns = weight_SOI.shape
    height, width = parts * -(-inner // GROUP) * GROUP, -(-columns // GROUP) * GROUP

    def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        code = torch.empty(slots, rows, columns, dtype=FP8, device=weight_SOI.device)
        return code, code.new_empty(slots, rows // GROUP, columns // GROUP, dtype=torch.float32)

    one = empty(height, width) if straight else None
    other = empty(width, height) if turned else None
    some = one or other
    assert some is not None
    if some[0].numel():
        _quantise_weight[(some[1].numel(),)](
            weight_SOI, *weight_SOI.stride(), *(one or some), *(other or some), F=inner, COLUMNS=columns, PARTS=parts,
            INTERLEAVED=interleaved, N=height, K=width, STRAIGHT=straight, TURNED=turned, num_warps=8,
        )  # fmt: skip
    return one, other


def gather_wide(
    rows: HiddenStates,
    hidden: int,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(P, hidden) decoded from packets; zeros if the arena was too small. Rows past the count are not written."""
    out_PH = torch.empty(order_P.shape[0], hidden, dtype=dtype, device=order_P.device)
    if out_PH.numel() and offsets_S.numel():
        home, groups = rows.home, min(4, power_of_2(cdiv(hidden, GROUP)))
        tile = 16 // groups
        _gather_wide[programs(out_PH, tile, groups * GROUP)](
            rows.data, rows.data if rows.start is None else rows.start, rows.data if home is None else home, order_P,
            offsets_S, out_PH, offsets_S.shape[0], rows.slab or 2**31 - 1, rows.home_row,
            0 if home is None else home.shape[0], J=slot_RJ.shape[1], H=hidden, PACKET=rows.width,
            SCALES_AT=scales_at(hidden), HAS_START=rows.start is not None, HAS_HOME=home is not None, ROWS=tile,
            GROUPS=groups, num_warps=4,
        )  # fmt: skip
    return out_PH


def activate_backward(
    activation: Activation,
    inner: int,
    h: HiddenStates,
    dA_PF: torch.Tensor,
    dy_PH: torch.Tensor | None,
    bias_SH: torch.Tensor | None,
    weight_RJ: torch.Tensor,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    wants_wide: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """((code, scale) of dh, dh, weight * a, dweight_RJ); the second and third are empty unless wanted."""
    pairs, width = dA_PF.shape[0], h.width
    code_PW = torch.empty(pairs, width, dtype=FP8, device=dA_PF.device)
    scale_PG = torch.empty(pairs, width // GROUP, dtype=torch.float32, device=dA_PF.device)
    dh_PW = dA_PF.new_empty(pairs if wants_wide else 0, width)
    scaled_PF = dA_PF.new_empty(pairs if wants_wide else 0, inner)
    dweight_RJ = torch.zeros_like(weight_RJ)
    if dA_PF.numel() and offsets_S.numel():
        described = {key: value for key, value in constants(activation).items() if key != "INTERLEAVED"}
        _activate_backward[programs(dA_PF[:, :GROUP], 16, GROUP, per_processor=8)](
            h.data, h.data if h.start is None else h.start, dA_PF, weight_RJ, dA_PF if bias_SH is None else dy_PH,
            dA_PF if bias_SH is None else bias_SH.contiguous(), order_P, slot_RJ, offsets_S, code_PW, scale_PG, dh_PW,
            scaled_PF, dweight_RJ, offsets_S.shape[0], F=inner, FP=dA_PF.shape[1], W=width,
            H=1 if dy_PH is None else dy_PH.shape[1], **described, HAS_BIAS=bias_SH is not None,
            HAS_START=h.start is not None, WIDE=wants_wide, ROWS=16, num_warps=4,
        )  # fmt: skip
    return (code_PW, scale_PG), dh_PW, scaled_PF, dweight_RJ
