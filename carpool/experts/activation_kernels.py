"""The CUDA side of `carpool.experts.pairs.activate` and its backward: everything between the two grouped products.

    forward     h (+ bias)  ->  a = act(h),  and a copy of h in the arena, if there is one
    backward    h, dA       ->  dh = weight * dA * act'(h),  weight * a,  and per pair sum(dA * a) (+ sum(dy * bias))

One pass each. P pairs with F1 = 2F: the forward reads 2F and writes F (2F more into an arena); the backward reads
3F and writes 3F, where PyTorch's elementwise operations would move 14F forward and back again for the same.
Arithmetic is float32 (float64 for float64), each result is rounded once, except that h is rounded after its bias as
if the product had been written with it: the forward must compute from the h that the backward will see.

`_act` gives an activation and its derivative together; the compiler removes the one that is not used. gelu_tanh is x *
sigmoid(2u), which is 0.5 x (1 + tanh(u)) without a tanh. Comparisons are written so that a NaN stays one where it does
in PyTorch.

Persistent over the pairs that are there: see pair_kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from carpool.activations import HiddenStates
from carpool.experts.base import Activation
from carpool.experts.pair_kernels import accumulator, programs, tiling
from carpool.kernels.quick import quick


@triton.jit
def _act(x, NAME: tl.constexpr, ALPHA: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(x) and its derivative."""
    if NAME == "silu":
        s = tl.sigmoid(x * ALPHA)
        value = x * s
        slope = s * (1.0 + x * ALPHA * (1.0 - s))
    elif NAME == "gelu":
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(NAME == "relu" or NAME == "relu2")
        value = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0).to(x.dtype)
        if NAME == "relu2":
            slope = 2.0 * value
            value = value * value
    return value, slope


@triton.jit
def _clamp(gate, up, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_LIMIT:
        if gate.dtype == tl.float64:
            # There a number would be rounded to float32 by the other way, which spills less.
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        else:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _value(  # type: ignore[no-untyped-def]
    gate, up, NAME: tl.constexpr, GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """a of gate and up; without a gate both are h."""
    gate, up = _clamp(gate, up, HAS_LIMIT, LIMIT)
    value, _ = _act(gate, NAME, ALPHA)
    if GATED:
        value *= up + SHIFT
    return value


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    gate, up, grad, NAME: tl.constexpr, GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """(a, gradient of gate, gradient of up), where grad is that of a."""
    below, above = _clamp(gate, up, HAS_LIMIT, LIMIT)
    value, slope = _act(below, NAME, ALPHA)
    dgate = grad * slope
    dup = grad * value
    if GATED:
        dgate *= above + SHIFT
        value *= above + SHIFT
    if HAS_LIMIT:
        dgate = tl.where(gate <= LIMIT, dgate, 0.0)
        dup = tl.where((up <= LIMIT) & (up >= -LIMIT), dup, 0.0)
    return value, dgate, dup


@triton.jit
def _load_h(  # type: ignore[no-untyped-def]
    h, bias, kept, row, own, column, live, keep, WIDTH: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """h[row, FIRST + column] for column < COLUMNS, after the bias, rounded; also written to `kept` where `keep`."""
    inside = (column < COLUMNS)[None, :]
    mask = live[:, None] & inside
    at = row[:, None] * WIDTH + FIRST + column[None, :]
    value = tl.load(h + at, mask=mask, other=0.0)
    if HAS_BIAS:
        add = tl.load(bias + own[:, None] * WIDTH + FIRST + column[None, :], mask=mask, other=0.0)
        value = (value.to(ACC) + add.to(ACC)).to(value.dtype)
    if KEEP:
        tl.store(kept + at, value, mask=keep[:, None] & inside)
    return value.to(ACC)


@triton.jit
def _load_gate_and_up(  # type: ignore[no-untyped-def]
    h, bias, kept, row, own, block, live, keep, F: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate and up of one block of columns of a; without a gate both are h."""
    if INTERLEAVED:
        # Read as it lies, in wide pieces, and taken apart in registers.
        twice = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = _load_h(h, bias, kept, row, own, twice, live, keep, WIDTH, 0, WIDTH, HAS_BIAS, KEEP, ACC)
        gate, up = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    else:
        column = block * BLOCK + tl.arange(0, BLOCK)
        gate = _load_h(h, bias, kept, row, own, column, live, keep, WIDTH, 0, F, HAS_BIAS, KEEP, ACC)
        up = gate
        if GATED:
            up = _load_h(h, bias, kept, row, own, column, live, keep, WIDTH, F, F, HAS_BIAS, KEEP, ACC)
    return gate, up


@quick
@triton.jit
def _activation(  # type: ignore[no-untyped-def]
    h, bias, kept, start, order, slot, offsets, out, slots, F: tl.constexpr, WIDTH: tl.constexpr, NAME: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, HAS_START: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.load(offsets + slots - 1)
    # Without room in the arena nothing is kept, but what the layer computes is right.
    room = count
    if HAS_START:
        begin = tl.load(start)
        room = tl.where(begin < 0, 0, count)
        kept += tl.multiple_of(begin, 16)
    chunks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS) * chunks, tl.num_programs(0)):
        pair = (tile // chunks) * ROWS + tl.arange(0, ROWS)
        block = tile % chunks
        live = pair < count
        row = pair.to(tl.int64)
        own = row
        if HAS_BIAS:
            own = tl.load(slot + tl.load(order + pair, mask=live, other=0), mask=live, other=0).to(tl.int64)
        gate, up = _load_gate_and_up(
            h, bias, kept, row, own, block, live, pair < room,
            F, WIDTH, GATED, INTERLEAVED, HAS_BIAS, KEEP, ACC, ROWS, BLOCK,
        )  # fmt: skip
        if NAME != "none":
            value = _value(gate, up, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            column = block * BLOCK + tl.arange(0, BLOCK)
            mask = live[:, None] & (column < F)[None, :]
            tl.store(out + row[:, None] * F + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@quick
@triton.jit
def _activation_backward(  # type: ignore[no-untyped-def]
    h, start, d, weight, dy, bias, order, slot, offsets, dh, scaled, dweight, slots, F: tl.constexpr,
    WIDTH: tl.constexpr, H: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr, WANTS_SCALED: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
        factor = tl.load(weight + entry, mask=live, other=0.0).to(ACC)[:, None]
        product = tl.zeros((ROWS, BLOCK), ACC)
        for block in range(0, (F + BLOCK - 1) // BLOCK):
            gate, up = _load_gate_and_up(
                h, h, h, row, row, block, live, live, F, WIDTH, GATED, INTERLEAVED, False, False, ACC, ROWS, BLOCK
            )
            column = block * BLOCK + tl.arange(0, BLOCK)
            mask = live[:, None] & (column < F)[None, :]
            grad = tl.load(d + row[:, None] * F + column[None, :], mask=mask, other=0.0).to(ACC)
            value, dgate, dup = _slopes(gate, up, grad * factor, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            product += grad * value
            if INTERLEAVED:
                twice = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
                at = dh + row[:, None] * WIDTH + twice[None, :]
                both = tl.reshape(tl.join(dgate, dup), (ROWS, 2 * BLOCK))
                tl.store(at, both.to(dh.dtype.element_ty), mask=live[:, None] & (twice < WIDTH)[None, :])
            else:
                at = dh + row[:, None] * WIDTH + column[None, :]
                tl.store(at, dgate.to(dh.dtype.element_ty), mask=mask)
                if GATED:
                    tl.store(at + F, dup.to(dh.dtype.element_ty), mask=mask)
            if WANTS_SCALED:
                at = scaled + row[:, None] * F + column[None, :]
                tl.store(at, (value * factor).to(scaled.dtype.element_ty), mask=mask)
        total = tl.sum(product, 1)
        if HAS_BIAS:
            own = tl.load(slot + entry, mask=live, other=0).to(tl.int64)
            product = tl.zeros((ROWS, BLOCK), ACC)
            for block in range(0, (H + BLOCK - 1) // BLOCK):
                column = block * BLOCK + tl.arange(0, BLOCK)
                mask = live[:, None] & (column < H)[None, :]
                grad = tl.load(dy + row[:, None] * H + column[None, :], mask=mask, other=0.0).to(ACC)
                product += grad * tl.load(bias + own[:, None] * H + column[None, :], mask=mask, other=0.0).to(ACC)
            total += tl.sum(product, 1)
        tl.store(dweight + entry, total.to(dweight.dtype.element_ty), mask=live)


def activate(
    activation: Activation | None,
    h_PF1: torch.Tensor,
    bias_SF: torch.Tensor | None,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    kept: HiddenStates,
) -> torch.Tensor:
    """a_PF = activation(h + bias), and h + bias written to `kept`, which may be h itself. Rows past the count are not
    touched. Without an activation there is no a, and an empty tensor is returned."""
    pairs, width = h_PF1.shape
    inner = width // 2 if activation is not None and activation.gated else width
    a_PF = h_PF1.new_empty(0 if activation is None else pairs, inner)
    if h_PF1.numel() and offsets_S.numel():
        interleaved = activation is not None and activation.interleaved
        tile, block = tiling(inner, 1024 if interleaved else 2048)
        _activation[programs(h_PF1[:, :inner], tile, block)](
            h_PF1, h_PF1 if bias_SF is None else bias_SF.contiguous(), kept.data,
            h_PF1 if kept.start is None else kept.start, order_P, slot_RJ, offsets_S, a_PF, offsets_S.shape[0],
            F=inner, WIDTH=width, **constants(activation), HAS_BIAS=bias_SF is not None,
            KEEP=bias_SF is not None or kept.data is not h_PF1, HAS_START=kept.start is not None,
            ACC=accumulator(h_PF1), ROWS=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return a_PF


def activate_backward(
    activation: Activation,
    h: HiddenStates,
    dA_PF: torch.Tensor,
    dy_PH: torch.Tensor,
    bias_SH: torch.Tensor | None,
    weight_RJ: torch.Tensor,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    wants_scaled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dh_PF1, weight * a, dweight_RJ); `weight * a` is empty unless wanted. Rows past the count are not written."""
    pairs, inner = dA_PF.shape
    dh_PF1 = dA_PF.new_empty(pairs, h.width)
    scaled_PF = dA_PF.new_empty(pairs if wants_scaled else 0, inner)
    dweight_RJ = torch.zeros_like(weight_RJ)
    if dA_PF.numel() and offsets_S.numel():
        tile, block = tiling(inner, 1024)
        _activation_backward[programs(dA_PF[:, :block], tile, block, per_processor=8)](
            h.data, h.data if h.start is None else h.start, dA_PF, weight_RJ, dy_PH,
            dy_PH if bias_SH is None else bias_SH.contiguous(), order_P, slot_RJ, offsets_S, dh_PF1, scaled_PF,
            dweight_RJ, offsets_S.shape[0], F=inner, WIDTH=h.width, H=dy_PH.shape[1], **constants(activation),
            HAS_BIAS=bias_SH is not None, HAS_START=h.start is not None, WANTS_SCALED=wants_scaled,
            ACC=accumulator(dA_PF), ROWS=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dh_PF1, scaled_PF, dweight_RJ


def constants(activation: Activation | None) -> dict[str, Any]:
    """What kernels are compiled for. Without an activation, h is one part and nothing is made of it."""
    if activation is None:
        activation, name = Activation("silu"), "none"
    else:
        name = activation.name
    return {
        "NAME": name, "GATED": activation.gated, "INTERLEAVED": activation.interleaved,
        "HAS_LIMIT": activation.limit is not None, "LIMIT": float(activation.limit or 0.0),
        "ALPHA": float(activation.alpha), "SHIFT": float(activation.up_shift),
    }  # fmt: skip
