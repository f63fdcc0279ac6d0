"""Grouped products of FP8 rows with FP8 weights: the GEMMs of `carpool.experts.fp8` on CUDA.

    product     (P, K) rows sorted by slot, times each slot's (N, K) matrix  ->  (P, N)
    activate    the same, and from the sums h: h as it is kept, a = act(h), and a quantised as the next product's rows

Rows come as codes and one float32 scale for 128 columns. Either they lie in order, or they are gathered from packets
(codes and scales of a row side by side, as they travelled) while they are loaded, so that no sorted copy is made. Both
operands have their K side by side, which is the only way that Hopper's FP8 instructions read them, so backward products
take the weights quantised the other way round.

What the tensor cores add up in FP8 has few bits, so one block of 128 columns is as far as they go:

    for each block k of 128 columns:    sum += (codes_k @ weight_codes_k) * row_scale_k * weight_scale_k     in float32

which takes two sets of accumulators. A tile is therefore BM rows by two halves of 128 columns, multiplied one after the
other, so that one set of products serves both, and so do the loaded rows: as much from memory as a tile of 256 columns.
The halves are gate and up of the same columns, so that the activation and the groups of its result stay inside a tile,
or neighbours where there is no gate. Multiplying and scaling take turns: the compiler waits for a product before it
adds it, and all warps do so together. In hopper_kernels.py they do not: on Hopper that computes whatever it takes,
and this remains for the rest (results in float32, packets of odd widths, other GPUs), and for the interpreter.

Takes all 255 registers of a thread and spills nothing in the loop. For that, what only the end of a tile needs is
loaded again there: held over the loop, it took 22 more than there are. Two products at a time would take 64 more.
Tiles of 64 rows by 4 warps, two programs on a multiprocessor, load two thirds more for the same work.

Persistent: `schedule` lists the tiles of rows that there are (a slot's last tile may be partly empty, an idle slot has
none). Program i of n takes tiles i, i + n, ..., neighbours in columns first, which read the same rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from carpool.activations import HiddenStates
from carpool.experts.activation_kernels import _value, constants
from carpool.experts.base import Activation
from carpool.experts.gemm.gemm_tiles import AMPLE, shared_memory
from carpool.kernels import GROUP
from carpool.kernels.device import processors
from carpool.kernels.packets import FP8
from carpool.kernels.quick import power_of_2, quick


class Tiling(NamedTuple):
    """Rows of a tile, and how it is computed."""

    rows: int = 128
    warps: int = 8
    stages: int = 4
    programs: int = 1  # on each multiprocessor


@quick
@triton.jit
def _schedule(offsets, tile_slot, tile_row, tiles, slots, BM: tl.constexpr, SP: tl.constexpr, BT: tl.constexpr):  # type: ignore[no-untyped-def]
    own = tl.program_id(0)
    slot = tl.arange(0, SP)
    end = tl.load(offsets + slot, mask=slot < slots, other=0)
    begin = tl.load(offsets + slot - 1, mask=(slot > 0) & (slot < slots), other=0)
    count = tl.where(slot < slots, (end - begin + BM - 1) // BM, 0)
    first = tl.sum(tl.where(slot < own, count, 0), 0)
    mine = tl.sum(tl.where(slot == own, count, 0), 0)
    row = tl.sum(tl.where(slot == own, begin, 0), 0)
    for block in range(0, mine, BT):
        at = block + tl.arange(0, BT)
        tl.store(tile_slot + first + at, tl.zeros((BT,), tl.int32) + own, mask=at < mine)
        tl.store(tile_row + first + at, row + at * BM, mask=at < mine)
    if own == 0:
        tl.store(tiles, tl.sum(count, 0))


@triton.jit
def _quantise(value):  # type: ignore[no-untyped-def]
    """(codes, scale) of each row of a tile of one group."""
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-30) / 448.0
    return (value * (1.0 / scale)[:, None]).to(tl.float8e4nv), scale


@triton.jit
def _write_group(codes, scales, value, row, live, group, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    code, scale = _quantise(value)
    column = group * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(codes + at, code, mask=live[:, None])
    tl.store(scales + row.to(tl.int64) * (WIDTH // 128) + group, scale, mask=live)


@triton.jit
def _finish_h(sums, bias, kept, slot, row, keep, first, W: tl.constexpr, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """h of 128 columns from `first`, rounded as it is kept, and kept."""
    column = first + tl.arange(0, 128)
    if HAS_BIAS:
        sums += tl.load(bias + slot.to(tl.int64) * W + column).to(tl.float32)[None, :]
    h = sums.to(kept.dtype.element_ty)
    tl.store(kept + row.to(tl.int64)[:, None] * W + column[None, :], h, mask=keep[:, None])
    return h.to(tl.float32)


@quick
@triton.jit(do_not_specialize=["home_row", "home_rows", "slots"])
def _gemm(  # type: ignore[no-untyped-def]
    rows, scales, home, home_row, home_rows, order, weight, weight_scales, tile_slot, tile_row, tiles, offsets,
    slots, out, out_scales, bias, kept, start, J: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, PACKET: tl.constexpr, HAS_HOME: tl.constexpr, ACTIVATE: tl.constexpr, NAME: tl.constexpr,
    GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_START: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """rows: packets of PACKET bytes, or (PACKET = 0) (P, KP) codes with (P, KP / 128) scales. weight: (slots * N, KP)
    codes. out: (P, COLUMNS), or if ACTIVATE (P, F) codes, F being half of N if GATED, with (P, F / 128) scales.
    """
    apart: tl.constexpr = N // 2 if GATED else 128  # from one half of a tile to the other
    across: tl.constexpr = N // 256 if GATED else (N + 255) // 256
    step: tl.constexpr = 128 if GATED else 256
    blocks: tl.constexpr = KP // 128
    codes = rows.to(tl.pointer_type(tl.float8e4nv))
    count = tl.load(offsets + slots - 1)
    # Without room in the arena nothing is kept, but what the layer computes is right.
    room = count
    if HAS_START:
        begin = tl.load(start)
        room = tl.where(begin < 0, 0, count)
        kept += tl.multiple_of(begin, 16)
    for tile in range(tl.program_id(0), tl.load(tiles) * across, tl.num_programs(0)):
        slot = tl.load(tile_slot + tile // across)
        first = tile % across * step
        # A place past the slot's end computes some row that is there, and is not written.
        safe = tl.minimum(tl.load(tile_row + tile // across) + tl.arange(0, BM), count - 1)
        if PACKET > 0:
            arrived = tl.load(order + safe) // J
            at = arrived.to(tl.int64) * PACKET
            if HAS_HOME:
                at_home = (arrived >= home_row) & (arrived < home_row + home_rows)
                apart_bytes = home.to(tl.int64) - rows.to(tl.int64)
                at = tl.where(at_home, apart_bytes + (arrived - home_row).to(tl.int64) * PACKET, at)
            at = tl.multiple_of(at, 16)
            # Past its codes, which are rounded up to whole words, a packet has its scales.
            scale = (rows + at).to(tl.pointer_type(tl.float32)) + (K + 3) // 4
        else:
            at = tl.multiple_of(safe.to(tl.int64) * KP, 16)
            scale = scales + safe.to(tl.int64) * blocks
        column = tl.arange(0, 128)
        code = codes + at[:, None] + column[None, :]
        weight_row = slot * N + first
        weight_scale = weight_scales + (weight_row // 128).to(tl.int64) * blocks
        sum0 = tl.zeros((BM, 128), tl.float32)
        sum1 = tl.zeros((BM, 128), tl.float32)
        for k in tl.range(0, blocks, num_stages=STAGES):
            if PACKET > 0 and K % 128 != 0:
                x = tl.load(code + k * 128, mask=(k * 128 + column < K)[None, :], other=0.0)
            else:
                x = tl.load(code + k * 128)
            by_row = tl.load(scale + k)
            by_block0 = tl.load(weight_scale + k)
            # The last tile's second half may be past the last column.
            by_block1 = tl.load(weight_scale + (apart // 128) * blocks + k, mask=first + apart < N, other=0.0)
            w0 = weight.load([weight_row, k * 128])
            w1 = weight.load([weight_row + apart, k * 128])
            sum0 += tl.dot(x, w0.T) * (by_row * by_block0)[:, None]
            sum1 += tl.dot(x, w1.T) * (by_row * by_block1)[:, None]
        # Loaded again, as the compiler cannot know that it is the same: these would take registers of the loop.
        row = tl.load(tile_row + tile // across, volatile=True) + tl.arange(0, BM)
        live = row < tl.load(offsets + slot, volatile=True)
        if ACTIVATE:
            h0 = _finish_h(sum0, bias, kept, slot, row, live & (row < room), first, N, HAS_BIAS)
            if GATED:
                h1 = _finish_h(sum1, bias, kept, slot, row, live & (row < room), first + apart, N, HAS_BIAS)
                value = _value(h0, h1, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
                _write_group(out, out_scales, value, row, live, first // 128, N // 2)
            else:
                value = _value(h0, h0, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
                _write_group(out, out_scales, value, row, live, first // 128, N)
                if first + 128 < N:
                    h1 = _finish_h(sum1, bias, kept, slot, row, live & (row < room), first + 128, N, HAS_BIAS)
                    value = _value(h1, h1, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
                    _write_group(out, out_scales, value, row, live, first // 128 + 1, N)
        else:
            target = out + row.to(tl.int64)[:, None] * COLUMNS + first + column[None, :]
            inside = first + column
            tl.store(target, sum0.to(out.dtype.element_ty), mask=live[:, None] & (inside < COLUMNS)[None, :])
            inside += 128
            tl.store(target + 128, sum1.to(out.dtype.element_ty), mask=live[:, None] & (inside < COLUMNS)[None, :])


def up_and_activate(
    activation: Activation,
    rows: HiddenStates,
    hidden: int,
    code_SNK: torch.Tensor,
    scale: torch.Tensor,
    bias_SW: torch.Tensor | None,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    h: HiddenStates,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(code, scale) of a, and h written where it is kept; rows past the count are not written."""
    columns = code_SNK.shape[1] // 2 if activation.gated else code_SNK.shape[1]
    code_PF = torch.empty(order_P.shape[0], columns, dtype=FP8, device=order_P.device)
    scale_PG = torch.empty(order_P.shape[0], columns // GROUP, dtype=torch.float32, device=order_P.device)
    described = {key: value for key, value in constants(activation).items() if key != "INTERLEAVED"}
    _launch(
        rows.data, None, rows, hidden, code_SNK, scale, slot_RJ, order_P, offsets_S, code_PF, columns,
        tiling(rows.data.device), scale_PG, bias_SW, h, described,
    )  # fmt: skip
    return code_PF, scale_PG


def product(
    code_PK: torch.Tensor,
    scale_PG: torch.Tensor,
    code_SNK: torch.Tensor,
    scale: torch.Tensor,
    offsets_S: torch.Tensor,
    out_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(P, out_columns) of rows that lie in order; rows past the count are not written."""
    out = torch.empty(code_PK.shape[0], out_columns, dtype=dtype, device=code_PK.device)
    _launch(
        code_PK, scale_PG, None, code_PK.shape[1], code_SNK, scale, offsets_S, offsets_S, offsets_S, out, out_columns,
        tiling(out.device),
    )  # fmt: skip
    return out


def gathered_product(
    rows: HiddenStates,
    hidden: int,
    code_SNK: torch.Tensor,
    scale: torch.Tensor,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    out_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same of packets, gathered while they are loaded."""
    out = torch.empty(order_P.shape[0], out_columns, dtype=dtype, device=order_P.device)
    _launch(
        rows.data, None, rows, hidden, code_SNK, scale, slot_RJ, order_P, offsets_S, out, out_columns,
        tiling(out.device),
    )  # fmt: skip
    return out


def tiling(device: torch.device) -> Tiling:
    """How a product is computed; the same for every size, so that reruns are bitwise equal. Fewer steps are in shared
    memory where there is less of it."""
    return Tiling(stages=4 if shared_memory(device) >= AMPLE else 3)


def _launch(
    data: torch.Tensor,
    scale_PG: torch.Tensor | None,
    packets: HiddenStates | None,
    inner: int,
    code_SNK: torch.Tensor,
    weight_scale: torch.Tensor,
    slot_RJ: torch.Tensor,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    out: torch.Tensor,
    out_columns: int,
    tile: Tiling,
    out_scale: torch.Tensor | None = None,
    bias_SW: torch.Tensor | None = None,
    h: HiddenStates | None = None,
    activation: dict[str, Any] | None = None,
) -> None:
    slots, height, width = code_SNK.shape
    if not (out.numel() and code_SNK.numel()):
        return
    assert packets is None or packets.start is None, "rows are gathered where they arrived"
    home = None if packets is None else packets.home
    described = activation or {
        "NAME": "silu", "GATED": False, "HAS_LIMIT": False, "LIMIT": 0.0, "ALPHA": 1.0, "SHIFT": 0.0,
    }  # fmt: skip
    tiles = schedule(offsets_S, out.shape[0], tile.rows)
    if out.is_cuda:
        # Imported where there is a GPU: not every Triton that interprets has Gluon.
        from carpool.experts.fp8 import fp8_hopper_kernels

        if tile.rows == fp8_hopper_kernels.ROWS and fp8_hopper_kernels.takes(out, h, packets, inner):
            fp8_hopper_kernels.launch(
                data, scale_PG, packets, inner, code_SNK, weight_scale, slot_RJ.shape[-1], order_P, offsets_S, tiles,
                out, out_columns, out_scale, bias_SW, h, described, activation is not None,
            )  # fmt: skip
            return
    weight = TensorDescriptor.from_tensor(code_SNK.view(slots * height, width), [GROUP, GROUP])
    programs = 2  # in the interpreter, so that each takes several tiles
    if out.is_cuda:
        programs = processors(out.device) * tile.programs
    _gemm[(programs,)](
        data.view(torch.uint8), weight_scale if scale_PG is None else scale_PG,
        data.view(torch.uint8) if home is None else home, 0 if packets is None else packets.home_row,
        0 if home is None else home.shape[0], order_P, weight, weight_scale, *tiles, offsets_S, slots,
        out, weight_scale if out_scale is None else out_scale, weight_scale if bias_SW is None else bias_SW,
        weight_scale if h is None else h.data, offsets_S if h is None or h.start is None else h.start,
        J=slot_RJ.shape[-1], K=inner, KP=width, N=height, COLUMNS=out_columns,
        PACKET=0 if packets is None else packets.width, HAS_HOME=home is not None, ACTIVATE=activation is not None,
        **described, HAS_BIAS=bias_SW is not None, HAS_START=h is not None and h.start is not None, BM=tile.rows,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def schedule(offsets_S: torch.Tensor, num_pairs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slot, first row) of each tile of at most `rows` rows of one slot, and how many tiles there are; int32.

    Example: offsets [3, 3, 8], 4 rows  ->  slots [0, 2, 2], rows [0, 3, 7], 3 tiles
    """
    slots = offsets_S.shape[0]
    tile_slot, tile_row = offsets_S.new_empty(2, num_pairs // rows + slots)
    tiles = offsets_S.new_empty(1)
    _schedule[(slots,)](
        offsets_S, tile_slot, tile_row, tiles, slots, BM=rows, SP=power_of_2(slots), BT=128, num_warps=1
    )
    return tile_slot, tile_row, tiles
