"""The products of gemm_kernels.py on Hopper, by warps that load beside warps that multiply; no bit differs.

There, all warps of a program load, multiply and scale in step, and the tensor cores idle while sums are scaled. Here a
program is three groups of four warps, which wait for each other only where data is handed over (mbarriers):

    loads       steps of 128 columns into a ring of 4: codes of 128 rows, of 2 x 128 rows of the weight (TMA), and the
                rows' scales. Rows in order come by TMA, gathered ones by cp.async, 16 bytes a thread
    multiplies  two groups, 64 rows each:   sum += (codes @ weight codes) * row scale * weight scale,  half by half
                and then what is to be done with the sums

    ring       | step 0 | step 1 | step 2 | step 3 |        full[i]: 128 threads' copies have come, and TMA's bytes
    loads      4  ----------------------------->            empty[i]: both groups have multiplied
    group 0        [mul][scale][mul][scale]                 while one group scales, the other's products fill
    group 1           [mul][scale][mul][scale]              the tensor cores

A group keeps 128 sums a thread and 64 of the product that is under way, in 232 registers; who loads makes do with 40.
A group none of whose rows are the slot's does not multiply: half of the last tile of most slots. Loads of the next tile
begin while the sums of this one are finished.

In Gluon, Triton's lower level, because Triton itself waits for a product before it goes on and splits no warps on
Hopper. Gluon cannot be interpreted: tests on a CPU see the other kernel, tests on a GPU compare the two.

Measured on one H200 against the other kernel (docs/log.md): 625 us instead of 785 for up, 292 instead of 381 for down
at T 8192, H 2048, F 1024, 64 experts, top 8; 840 to 1150 TFLOP/s over three shapes and four products. Neither 3 steps
in the ring nor starting one group later made a difference; 56 registers for the loads, 224 for the others: 5 % slower
where rows come in order. Gathering costs 6 %, the activation in the end of a tile 12 %.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from carpool.activations import HiddenStates
from carpool.experts.activation_kernels import _value
from carpool.kernels import GROUP
from carpool.kernels.device import processors
from carpool.kernels.hopper_copies import load_rows, load_tile
from carpool.kernels.quick import quick

ROWS = 128
STAGES = 4
LOADING_REGISTERS = 40
MULTIPLYING_REGISTERS = 232


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    rows, scales, home, home_row, home_rows, order, x, weight, tile_slot, tile_row, tiles, offsets, slots, a, b, s,
    full, empty, J: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, N: gl.constexpr, PACKET: gl.constexpr,
    HAS_HOME: gl.constexpr, GATED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every step of every tile of this program, as room comes free."""
    apart: gl.constexpr = N // 2 if GATED else 128
    across: gl.constexpr = N // 256 if GATED else (N + 255) // 256
    step: gl.constexpr = 128 if GATED else 256
    blocks: gl.constexpr = KP // 128
    piece: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    codes = rows.to(gl.pointer_type(gl.float8e4nv))
    count = gl.load(offsets + slots - 1)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.load(tiles) * across, gl.num_programs(0)):
        weight_row = gl.load(tile_slot + tile // across) * N + tile % across * step
        first = gl.load(tile_row + tile // across)
        safe = gl.minimum(first + gl.arange(0, BM, layout=line), count - 1)
        if PACKET > 0:
            row = gl.minimum(first + gl.arange(0, BM, layout=gl.SliceLayout(1, piece)), count - 1)
            at = _packet(gl.load(order + row) // J, rows, home, home_row, home_rows, PACKET, HAS_HOME)
            at_line = _packet(gl.load(order + safe) // J, rows, home, home_row, home_rows, PACKET, HAS_HOME)
            scale = (rows + at_line).to(gl.pointer_type(gl.float32)) + (K + 3) // 4
        else:
            scale = scales + safe.to(gl.int64) * blocks
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, piece))
        for k in range(blocks):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, 2 * 128 * 128 if PACKET > 0 else 2 * 128 * 128 + BM * 128)
            load_tile(weight, [weight_row, k * 128], ready, b.index(2 * stage))
            load_tile(weight, [weight_row + apart, k * 128], ready, b.index(2 * stage + 1))
            if PACKET > 0:
                begin = gl.multiple_of(at + k * 128, 16)
                if K % 128 != 0:
                    load_rows(
                        a.index(stage), codes + (begin[:, None] + column[None, :]), (k * 128 + column < K)[None, :]
                    )
                else:
                    load_rows(a.index(stage), codes + (begin[:, None] + column[None, :]))
            else:
                load_tile(x, [first, k * 128], ready, a.index(stage))
            load_rows(s.index(stage), scale + k)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _packet(arrived, rows, home, home_row, home_rows, PACKET: gl.constexpr, HAS_HOME: gl.constexpr):  # type: ignore[no-untyped-def]
    """The byte after `rows` where the packet of each arrived row begins."""
    at = arrived.to(gl.int64) * PACKET
    if HAS_HOME:
        delta = home.to(gl.int64) - rows.to(gl.int64)
        at_home = (arrived >= home_row) & (arrived < home_row + home_rows)
        at = gl.where(at_home, delta + (arrived - home_row).to(gl.int64) * PACKET, at)
    return gl.multiple_of(at, 16)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, weight_scales, tile_slot, tile_row, tiles, offsets, out, out_scales, bias, kept, start, a, b,
    s, full, empty, KP: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, ACTIVATE: gl.constexpr,
    NAME: gl.constexpr, GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_START: gl.constexpr, PACKET: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of half WHICH of every tile."""
    apart: gl.constexpr = N // 2 if GATED else 128
    across: gl.constexpr = N // 256 if GATED else (N + 255) // 256
    step: gl.constexpr = 128 if GATED else 256
    blocks: gl.constexpr = KP // 128
    HALF: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    room = 0x7FFFFFFF
    if HAS_START:
        # Without room in the arena nothing is kept, but what the layer computes is right.
        begin = gl.load(start)
        room = gl.where(begin < 0, 0, room)
        kept += gl.multiple_of(begin, 16)
    nothing = gl.zeros([HALF, 128], gl.float32, mma)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.load(tiles) * across, gl.num_programs(0)):
        slot = gl.load(tile_slot + tile // across)
        first = tile % across * step
        row_first = gl.load(tile_row + tile // across) + WHICH * HALF
        end = gl.load(offsets + slot)
        if WHICH == 0 or row_first < end:
            weight_scale = weight_scales + ((slot * N + first) // 128).to(gl.int64) * blocks
            second = first + apart < N
            sum0 = gl.zeros([HALF, 128], gl.float32, mma)
            sum1 = gl.zeros([HALF, 128], gl.float32, mma)
            block0 = gl.load(weight_scale)
            block1 = gl.load(weight_scale + (apart // 128) * blocks, mask=second, other=0.0)
            for k in range(blocks):
                following = gl.minimum(k + 1, blocks - 1)
                next0 = gl.load(weight_scale + following)
                next1 = gl.load(weight_scale + (apart // 128) * blocks + following, mask=second, other=0.0)
                mbarrier.wait(full.index(stage), phase)
                if PACKET > 0:
                    fence_async_shared()
                x = a.index(stage).slice(WHICH * HALF, HALF)
                part = warpgroup_mma(x, b.index(2 * stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                scale = s.index(stage).slice(WHICH * HALF, HALF).load(by_row)
                part = warpgroup_mma_wait(0, deps=[part])
                sum0 += part * (scale * block0)[:, None]
                part = warpgroup_mma(x, b.index(2 * stage + 1).permute((1, 0)), nothing, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage))
                sum1 += part * (scale * block1)[:, None]
                block0 = next0
                block1 = next1
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            if ACTIVATE:
                _activate(
                    sum0, sum1, out, out_scales, bias, kept, slot, row_first, first, end, room, N, NAME, GATED,
                    HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS, HALF, mma,
                )  # fmt: skip
            else:
                _store(out, sum0, row_first, end, first, COLUMNS, HALF)
                _store(out, sum1, row_first, end, first + 128, COLUMNS, HALF)
        else:
            for _ in range(blocks):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _store(out, value, row_first, end, first, COLUMNS: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 columns from `first` of the rows before `end`, in pieces of 16 bytes."""
    VEC: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    wide: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 4, 128 // VEC], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(out.dtype.element_ty), wide)
    row = row_first + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    column = first + gl.arange(0, 128, layout=gl.SliceLayout(0, wide))
    at = row.to(gl.int64)[:, None] * COLUMNS + column[None, :]
    gl.store(out + at, value, mask=(row < end)[:, None] & (column < COLUMNS)[None, :])


@gluon.jit
def _finish_h(  # type: ignore[no-untyped-def]
    sums, bias, kept, slot, row_first, end, first, W: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """h of 128 columns from `first`, rounded as it is kept, and kept."""
    if HAS_BIAS:
        column = first + gl.arange(0, 128, layout=gl.SliceLayout(0, mma))
        sums += gl.load(bias + slot.to(gl.int64) * W + column).to(gl.float32)[None, :]
    h = sums.to(kept.dtype.element_ty)
    _store(kept, h, row_first, end, first, W, HALF)
    return h.to(gl.float32)


@gluon.jit
def _write_group(  # type: ignore[no-untyped-def]
    codes, scales, value, row_first, end, group, WIDTH: gl.constexpr, HALF: gl.constexpr, mma: gl.constexpr
):
    scale = gl.maximum(gl.max(gl.abs(value), 1), 1e-30) / 448.0
    code = (value * (1.0 / scale)[:, None]).to(gl.float8e4nv)
    _store(codes, code, row_first, end, group * 128, WIDTH, HALF)
    row = row_first + gl.arange(0, HALF, layout=gl.SliceLayout(1, mma))
    gl.store(scales + row.to(gl.int64) * (WIDTH // 128) + group, scale, mask=row < end)


@gluon.jit
def _activate(  # type: ignore[no-untyped-def]
    sum0, sum1, out, out_scales, bias, kept, slot, row_first, first, end, room, N: gl.constexpr, NAME: gl.constexpr,
    GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HALF: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """h and the codes of act(h), from the sums of two times 128 columns."""
    keep = gl.minimum(end, room)
    h0 = _finish_h(sum0, bias, kept, slot, row_first, keep, first, N, HAS_BIAS, HALF, mma)
    if GATED:
        h1 = _finish_h(sum1, bias, kept, slot, row_first, keep, first + N // 2, N, HAS_BIAS, HALF, mma)
        value = _value(h0, h1, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
        _write_group(out, out_scales, value, row_first, end, first // 128, N // 2, HALF, mma)
    else:
        value = _value(h0, h0, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
        _write_group(out, out_scales, value, row_first, end, first // 128, N, HALF, mma)
        if first + 128 < N:
            h1 = _finish_h(sum1, bias, kept, slot, row_first, keep, first + 128, N, HAS_BIAS, HALF, mma)
            value = _value(h1, h1, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            _write_group(out, out_scales, value, row_first, end, first // 128 + 1, N, HALF, mma)


@quick
@gluon.jit(do_not_specialize=["home_row", "home_rows", "slots"])
def _gemm(  # type: ignore[no-untyped-def]
    rows, scales, home, home_row, home_rows, order, x, weight, weight_scales, tile_slot, tile_row, tiles, offsets,
    slots, out, out_scales, bias, kept, start, J: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, N: gl.constexpr,
    COLUMNS: gl.constexpr, PACKET: gl.constexpr, HAS_HOME: gl.constexpr, ACTIVATE: gl.constexpr, NAME: gl.constexpr,
    GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_START: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, LOADING: gl.constexpr,
    MULTIPLYING: gl.constexpr,
):  # fmt: skip
    """As `fp8_gemm_kernels._gemm`; x is a tensor map of rows that lie in order."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], shared)
    b = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], shared)
    s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each thread that loads arrives when its copies have, and one more of them says how many bytes TMA brings.
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, weight_scales, tile_slot, tile_row, tiles, offsets, out, out_scales, bias, kept, start, a, b, s,
                full, empty, KP, N, COLUMNS, ACTIVATE, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS,
                HAS_START, PACKET, BM, STAGES,
            )),
            (_multiply, (
                1, weight_scales, tile_slot, tile_row, tiles, offsets, out, out_scales, bias, kept, start, a, b, s,
                full, empty, KP, N, COLUMNS, ACTIVATE, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, HAS_BIAS,
                HAS_START, PACKET, BM, STAGES,
            )),
            (_load, (
                rows, scales, home, home_row, home_rows, order, x, weight, tile_slot, tile_row, tiles, offsets, slots,
                a, b, s, full, empty, J, K, KP, N, PACKET, HAS_HOME, GATED, BM, STAGES,
            )),
        ],
        [4, 4], [MULTIPLYING, LOADING],
    )  # fmt: skip


def takes(out: torch.Tensor, h: HiddenStates | None, packets: HiddenStates | None, hidden: int) -> bool:
    """Whether this kernel computes such a product: on Hopper, with results of two bytes, and packets that can be copied
    in pieces of 16."""
    if not out.is_cuda or torch.cuda.get_device_capability(out.device)[0] != 9:
        return False
    if packets is not None:
        sources = (packets.data,) if packets.home is None else (packets.data, packets.home)
        if hidden % 16 or any(source.data_ptr() % 16 for source in sources):
            return False
    return (out if h is None else h.data).element_size() == 2


def launch(
    data: torch.Tensor,
    scale_PG: torch.Tensor | None,
    packets: HiddenStates | None,
    inner: int,
    code_SNK: torch.Tensor,
    weight_scale: torch.Tensor,
    columns: int,
    order_P: torch.Tensor,
    offsets_S: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    out_columns: int,
    out_scale: torch.Tensor | None,
    bias_SW: torch.Tensor | None,
    h: HiddenStates | None,
    activation: dict[str, Any],
    activates: bool,
) -> None:
    """As `fp8_gemm_kernels._launch`, whose arguments these are.

    Args:
        columns: J, of the slots of an arrived row.
        tiles: of `ROWS` rows, from `fp8_gemm_kernels.schedule`.
    """
    slots, height, width = code_SNK.shape
    weight = _describe(code_SNK.view(slots * height, width), GROUP)
    x = _describe(data, ROWS) if packets is None else weight
    home = None if packets is None else packets.home
    _gemm[(processors(out.device),)](
        data.view(torch.uint8), weight_scale if scale_PG is None else scale_PG,
        data.view(torch.uint8) if home is None else home, 0 if packets is None else packets.home_row,
        0 if home is None else home.shape[0], order_P, x, weight, weight_scale, *tiles, offsets_S, slots, out,
        weight_scale if out_scale is None else out_scale, weight_scale if bias_SW is None else bias_SW,
        weight_scale if h is None else h.data, offsets_S if h is None or h.start is None else h.start, J=columns,
        K=inner, KP=width, N=height, COLUMNS=out_columns, PACKET=0 if packets is None else packets.width,
        HAS_HOME=home is not None, ACTIVATE=activates, **activation, HAS_BIAS=bias_SW is not None,
        HAS_START=h is not None and h.start is not None, BM=ROWS, STAGES=STAGES, LOADING=LOADING_REGISTERS,
        MULTIPLYING=MULTIPLYING_REGISTERS, num_warps=4,
    )  # fmt: skip


def _describe(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, GROUP], gl.NVMMASharedLayout(128, 8, 2))
