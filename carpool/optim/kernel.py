"""The update of many parameters in one launch; `adamw_reference.update` defines what it computes.

A table has one row of addresses and sizes for each parameter. A program updates one piece of one parameter:

    table     row 0: embedding, 4 M elements    row 1: a norm, 2048    ...
    pieces    (0, 0) (0, 64) (0, 128) ... (1, 0) ...          (row, first block of 256 elements)

It reads the weight, its gradient and what is kept, once, and writes them once: 28 bytes for an element in float32. A
block of 256 elements never crosses a row of the parameter's last dimension where moments are 8-bit codes.

Addresses come out of memory, so the compiler knows nothing of them, and would move one element at a time. Where all
addresses and the width are multiples of 16, the program says so and takes a way of its own through the same code.

A program is one warp, which has one block at a time, eight elements in a thread: what is one number for a block stays
one number, and nothing changes threads or waits for other warps.

Multiplications and additions are not fused (`enable_fp_fusion=False`), and square roots and divisions are rounded to
nearest, so that the results are those of plain PyTorch bit by bit. The kernel waits for memory, not for them. With
8-bit moments it waits for arithmetic: an update's root and quotient are the GPU's approximations then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import quick
from carpool.optim.adamw_reference import BELOW_2, EIGHT_NINTHS, LEAST_SCALE, NINTH, dynamic_map, thresholds

# Of a row of the table.
COLUMNS = 10
PIECE = 32  # blocks of 256 elements that a program updates
# How moments are kept.
FLOAT32, BFLOAT16, INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK = tl.constexpr(256)
LEAST = tl.constexpr(LEAST_SCALE)
# Of `adamw_reference.quantise`.
SIGNED_BOUNDS = tl.constexpr(tuple(thresholds(True).tolist()))
UNSIGNED_BOUNDS = tl.constexpr(tuple(thresholds(False).tolist()))
RATIO, START, BELOW = tl.constexpr(NINTH), tl.constexpr(EIGHT_NINTHS), tl.constexpr(BELOW_2)


def code_tables(device: torch.device) -> torch.Tensor:
    """The values of 8-bit codes, with a sign, then without: (512,) float32."""
    return torch.cat([dynamic_map(True), dynamic_map(False)]).to(device)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`adamw_reference.mix` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widen(bits):  # type: ignore[no-untyped-def]
    """float32 of a bfloat16's bits in int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, BOUNDS: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`adamw_reference.quantise` of quotients; without a sign, of those that are not 0."""
    magnitude = tl.abs(x)
    low4 = magnitude < BOUNDS[4]
    low2 = magnitude < tl.where(low4, BOUNDS[2], BOUNDS[6])
    low1 = magnitude < tl.where(low4, tl.where(low2, BOUNDS[1], BOUNDS[3]), tl.where(low2, BOUNDS[5], BOUNDS[7]))
    ratio = tl.where(low4, RATIO * 1e4, RATIO)
    ratio = tl.where(low2, ratio * 1e2, ratio)
    ratio = tl.where(low1, ratio * 10.0, ratio)
    share = tl.minimum(tl.maximum(magnitude * ratio + START, 1.0), BELOW)
    # Exponents of the ratios are 123, 127, 130, 133, 137, 140, 143 and 147: numbers from 0 to 7.
    shift = ((ratio.to(tl.int32, bitcast=True) >> 23) * 20 + (64 * (16 if SIGNED else 15) - 123 * 20)) >> 6
    distance = (share.to(tl.int32, bitcast=True) - (126 << 23)) >> shift
    if SIGNED:
        distance = tl.where(magnitude < BOUNDS[0], 0, distance)
        sign = x.to(tl.int32, bitcast=True) >> 31
        return tl.maximum((distance ^ sign) - sign + 127, 0)
    else:
        return distance - 1


@triton.jit
def _keep_codes(values, codes, scales, offset, inside, block, BOUNDS: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.max(tl.abs(values), axis=0)
    code = _code(values * tl.div_rn(1.0, tl.where(scale >= LEAST, scale, 1.0)), BOUNDS, SIGNED)
    if not SIGNED:
        code = tl.where(values > 0, code, 0)
    tl.store(codes + offset, code.to(tl.uint8), mask=inside)
    tl.store(scales + block, scale)


@triton.jit
def _piece(  # type: ignore[no-untyped-def]
    at, gradient, first, coefficients, steps, factor, tables, square, BFLOAT16_WEIGHT: tl.constexpr,
    BFLOAT16_GRAD: tl.constexpr, MOMENTS: tl.constexpr, ZERO_GRADS: tl.constexpr, ALIGNED: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    grad_type: tl.constexpr = tl.int16 if BFLOAT16_GRAD else tl.float32
    weight_type: tl.constexpr = tl.int16 if BFLOAT16_WEIGHT else tl.float32
    kept_type: tl.constexpr = tl.float32 if MOMENTS == FLOAT32 else tl.int16 if MOMENTS == BFLOAT16 else tl.uint8
    weights, gradients = tl.load(at).to(tl.pointer_type(weight_type)), gradient.to(tl.pointer_type(grad_type))
    firsts, seconds = tl.load(at + 1).to(tl.pointer_type(kept_type)), tl.load(at + 2).to(tl.pointer_type(kept_type))
    m_scales, v_scales = tl.load(at + 4), tl.load(at + 5)
    m_scales, v_scales = m_scales.to(tl.pointer_type(tl.float32)), v_scales.to(tl.pointer_type(tl.float32))
    lows, width = tl.load(at + 3).to(tl.pointer_type(tl.int16)), tl.load(at + 6)
    if ALIGNED:
        weights, gradients, lows = tl.multiple_of(weights, 16), tl.multiple_of(gradients, 16), tl.multiple_of(lows, 16)
        firsts, seconds, width = tl.multiple_of(firsts, 16), tl.multiple_of(seconds, 16), tl.multiple_of(width, 16)
    blocks, per_row, number = tl.load(at + 7).to(tl.int32), tl.load(at + 8).to(tl.int32), tl.load(at + 9)
    ours = coefficients + number * 7
    step_size, inverse_root, decay = tl.load(ours), tl.load(ours + 1), tl.load(ours + 2)
    take1, keep2, take2, eps = tl.load(ours + 3), tl.load(ours + 4), tl.load(ours + 5), tl.load(ours + 6)
    # One number for each thread.
    squares = tl.zeros([BLOCK // 8], tl.float32)
    for block in range(first, tl.minimum(first + PIECE, blocks)):
        row = block // per_row
        column = (block - row * per_row) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        offset = row.to(tl.int64) * width + column

        g = tl.load(gradients + offset, mask=inside, other=0)
        if BFLOAT16_GRAD:
            g = _widen(g)
        g = g * factor
        squares += tl.sum(tl.reshape(g * g, [BLOCK // 8, 8]), axis=1)
        w = tl.load(weights + offset, mask=inside, other=0)
        if BFLOAT16_WEIGHT:
            low = tl.load(lows + offset, mask=inside, other=0)
            w = ((w.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
        m, v = tl.load(firsts + offset, mask=inside, other=0), tl.load(seconds + offset, mask=inside, other=0)
        if MOMENTS == BFLOAT16:
            m, v = _widen(m), _widen(v)
        if MOMENTS == INT8:
            m = tl.load(tables + m.to(tl.int32)) * tl.load(m_scales + block)
            v = tl.load(tables + 256 + v.to(tl.int32)) * tl.load(v_scales + block)

        m = m + (g - m) * take1
        v = v * keep2 + g * g * take2
        w = w - w * decay
        if MOMENTS == INT8:
            w = w - m * step_size / (tl.sqrt(v) * inverse_root + eps)
        else:
            w = w - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inverse_root + eps)

        if BFLOAT16_WEIGHT:
            bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
            upper = (bits + 0x8000) >> 16
            tl.store(weights + offset, upper.to(tl.int16), mask=inside)
            tl.store(lows + offset, (bits - (upper << 16)).to(tl.int16), mask=inside)
        else:
            tl.store(weights + offset, w, mask=inside)
        if MOMENTS == INT8:
            m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
            _keep_codes(m, firsts, m_scales, offset, inside, block, SIGNED_BOUNDS, True)
            _keep_codes(v, seconds, v_scales, offset, inside, block, UNSIGNED_BOUNDS, False)
        elif MOMENTS == BFLOAT16:
            bits = m.to(tl.int32, bitcast=True)
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
            tl.store(firsts + offset, (bits >> 16).to(tl.int16), mask=inside)
            step = tl.load(steps + number).to(tl.int32).to(tl.uint32)
            key = _mix(step * 0x9E3779B9 + number.to(tl.uint32) * 0x85EBCA6B)
            noise = (_mix(offset.to(tl.uint32) ^ key) & 0xFFFF).to(tl.int32)
            tl.store(seconds + offset, ((v.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(firsts + offset, m, mask=inside)
            tl.store(seconds + offset, v, mask=inside)
        if ZERO_GRADS:
            tl.store(gradients + offset, tl.zeros_like(w).to(grad_type), mask=inside)
    tl.store(square, tl.sum(squares, axis=0))


@quick
@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, gradients, pieces, coefficients, steps, factor, tables, squares, BFLOAT16_WEIGHT: tl.constexpr,
    BFLOAT16_GRAD: tl.constexpr, MOMENTS: tl.constexpr, ZERO_GRADS: tl.constexpr, COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row, first = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    at, gradient, by = table + row * COLUMNS, tl.load(gradients + row), tl.load(factor)
    # A parameter without a gradient stays as it is, and with a factor that is NaN all do.
    if (gradient != 0) & (by == by):
        address = gradient | tl.load(at) | tl.load(at + 1) | tl.load(at + 2) | tl.load(at + 3) | tl.load(at + 6)
        if address % 16 == 0:
            _piece(
                at, gradient, first, coefficients, steps, by, tables, squares + piece,
                BFLOAT16_WEIGHT, BFLOAT16_GRAD, MOMENTS, ZERO_GRADS, True, PIECE,
            )  # fmt: skip
        else:
            _piece(
                at, gradient, first, coefficients, steps, by, tables, squares + piece,
                BFLOAT16_WEIGHT, BFLOAT16_GRAD, MOMENTS, ZERO_GRADS, False, PIECE,
            )  # fmt: skip
    else:
        tl.store(squares + piece, 0.0)


def launch(
    table: torch.Tensor,
    gradients: torch.Tensor,
    pieces: torch.Tensor,
    coefficients: torch.Tensor,
    steps: torch.Tensor,
    factor: torch.Tensor,
    tables: torch.Tensor,
    squares: torch.Tensor,
    *,
    bfloat16_weight: bool,
    bfloat16_grad: bool,
    moments: torch.dtype,
    zero_grads: bool,
) -> None:
    """Update all parameters of a table.

    Args:
        table: `(parameters, COLUMNS)` int64: addresses of weight, exp_avg, exp_avg_sq, low bits and both scales (0:
            none), elements of a row of blocks, blocks, blocks of a row, number of the parameter.
        gradients: `(parameters,)` int64, their addresses; 0: the parameter has none.
        pieces: `(n, 2)` int32, row of the table and first block.
        coefficients: `(numbers, 7)` float32, `adamw_reference.Coefficients` by number.
        steps: `(numbers,)` float32.
        factor: one float32, for all gradients. NaN: nothing is updated.
        tables: of `code_tables`.
        squares: `(n,)` float32, gets the sums of squares of the gradients, times `factor`, by piece.
        moments: float32, bfloat16 or uint8.
    """
    if len(pieces) == 0:
        return
    how = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.uint8: INT8}[moments]
    _adamw[(len(pieces),)](
        table,
        gradients,
        pieces,
        coefficients,
        steps,
        factor,
        tables,
        squares,
        BFLOAT16_WEIGHT=bfloat16_weight,
        BFLOAT16_GRAD=bfloat16_grad,
        MOMENTS=how.value,
        ZERO_GRADS=zero_grads,
        COLUMNS=COLUMNS,
        PIECE=PIECE,
        num_warps=1,
        enable_fp_fusion=False,
        # Of 8-bit moments' way as many programs as there can be on a multiprocessor, to hide its latencies.
        maxnreg=64 if how is INT8 else None,
    )
