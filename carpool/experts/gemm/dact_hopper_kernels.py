"""The product dact on Hopper, by four groups of four warps: one loads, two multiply, and one finishes.

In dact_kernels.py all warps of a program multiply, and then all of them finish the tile: they read h, compute the
activation's backward and write three results, while the tensor cores idle. Here dA of a tile passes through shared
memory, in bf16, to a group that finishes it while the next tile is multiplied. One program to a multiprocessor:

    loads       steps of 64 columns of dy into a ring of 3: 128 rows, gathered by cp.async, 16 bytes a thread; a block
                of the weight, 256 columns, by TMA
    multiplies  two groups, 64 rows of the tile each
    finishes    8 rows at a time, two to a warp

    ring       | step 0 | step 1 | step 2 |            full[i]: 128 threads' copies have come, and TMA's bytes
    loads      4  ------------------------>            empty[i]: both groups have multiplied
    group 0    [ multiply tile 0     ][give][ multiply tile 1 ...
    group 1    [ multiply tile 0     ][give][ multiply tile 1 ...        given[g]: group g's half of dA is there
    finishes                                [ finish tile 0       ][     taken[g]: it has been read

An adapter's share (`adapter_kernels.py`) is one step more, of 64 columns that are zero beyond its rank.

A group none of whose rows are the expert's does not multiply: half of the last tile of many experts. Sums are of 128
columns, two a group: the assembler refuses one of 256 in a program of sixteen warps. That costs the products a tenth of
their speed, so the product up, whose epilogue is short, is no faster this way (measured).

Unlike in dact_kernels.py, dA is rounded, as by the library's product.

In Gluon, for the reasons in fp8/hopper_kernels.py. Tests on a CPU see the other kernel; tests on a GPU compare both.
"""

from __future__ import annotations

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
from carpool.experts.activation_kernels import _slopes, constants
from carpool.experts.base import Activation
from carpool.experts.gemm.adapter_kernels import Share
from carpool.experts.gemm.gemm_tiles import BAND, TILE_ROWS, in_out
from carpool.experts.gemm.table_kernels import aligned
from carpool.kernels.device import processors
from carpool.kernels.hopper_copies import load_rows, load_tile, reinterpret
from carpool.kernels.quick import quick

COLUMNS, DEPTH = 256, 64
PIECE = 8
STAGES = 3
LOADING_REGISTERS = 64
MULTIPLYING_REGISTERS = 160
FINISHING_REGISTERS = 128


@gluon.jit
def _place(tiles, tile, heights, ACROSS: gl.constexpr, BAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile: its expert, its first pair, the end of the expert's, and its column."""
    band = tile // (BAND * ACROSS)
    height = gl.minimum(heights - band * BAND, BAND)
    within = tile - band * (BAND * ACROSS)
    entry = tiles + (1 + band * BAND + within % height) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), within // height


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    addresses, weight, inner, thin, tiles, heights, a, b, full, empty, K: gl.constexpr, N: gl.constexpr,
    Q: gl.constexpr, ACROSS: gl.constexpr, K_FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every step of every tile of this program, as room comes free."""
    piece: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, piece))
    column = gl.max_contiguous(gl.multiple_of(column, 8), 8)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), heights * ACROSS, gl.num_programs(0)):
        expert, first, end, n = _place(tiles, tile, heights, ACROSS, BAND)
        pair = first + gl.arange(0, BM, layout=gl.SliceLayout(1, piece))
        address = gl.load(addresses + pair, mask=pair < end, other=0)
        there = (address != 0)[:, None]
        for k in range(0, K, BK):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            block = b.index(stage)
            mbarrier.expect(ready, BK * BN * 2)
            if K_FIRST:
                load_tile(weight, [expert * K + k, n * BN], ready, block)
            else:
                load_tile(weight, [expert * N + n * BN, k], ready, block)
            row = gl.multiple_of((address + k * 2).to(gl.pointer_type(gl.bfloat16)), 16)
            load_rows(a.index(stage), row[:, None] + column[None, :], there)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if Q:
            # One step more. What a block has beyond the expert's Q rows is multiplied by zeros.
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            block = b.index(stage)
            mbarrier.expect(ready, BK * BN * 2)
            if K_FIRST:
                load_tile(thin, [expert * Q, n * BN], ready, block)
            else:
                load_tile(thin, [expert * N + n * BN, 0], ready, block)
            row = gl.multiple_of(inner + pair.to(gl.int64) * Q, 8)
            mask = (pair < end)[:, None] & (column < Q)[None, :]
            load_rows(a.index(stage), row[:, None] + column[None, :], mask)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, tiles, heights, a, b, sums, full, empty, given, taken, K: gl.constexpr, ACROSS: gl.constexpr,
    K_FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of half WHICH of every tile."""
    half: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    own = sums.index(WHICH)
    stage = 0
    phase = 0
    turn = 1
    for tile in range(gl.program_id(0), heights * ACROSS, gl.num_programs(0)):
        _, first, end, _ = _place(tiles, tile, heights, ACROSS, BAND)
        if WHICH == 0 or first + half < end:
            total = gl.zeros([half, BN], gl.float32, mma)
            for k in range(0, K, BK):
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()
                rows = a.index(stage).slice(WHICH * half, half)
                block = b.index(stage)
                if K_FIRST:
                    total = warpgroup_mma(rows, block, total, is_async=True)
                else:
                    total = warpgroup_mma(rows, block.permute((1, 0)), total, is_async=True)
                # The product before this one has ended.
                total = warpgroup_mma_wait(1, deps=[total])
                if k > 0:
                    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
            mbarrier.wait(taken.index(WHICH), turn)
            turn ^= 1
            own.store(total.to(gl.bfloat16))
            mbarrier.arrive(given.index(WHICH))
        else:
            for _ in range(0, K, BK):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _buffers(  # type: ignore[no-untyped-def]
    K_FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """(a, b, sums of half a tile each, the same as pieces of rows, full, empty, given, taken)"""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], swizzled)
    if K_FIRST:
        b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], swizzled)
    else:
        b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], swizzled)
    pieces = gl.allocate_shared_memory(gl.bfloat16, [BM // PIECE, PIECE, BN], plain)
    sums = reinterpret(pieces, gl.bfloat16, [2, BM // 2, BN], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    given = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        # Each thread that loads arrives when its copies have, and one more of them speaks for what TMA brings.
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    return a, b, sums, pieces, full, empty, given, taken


@gluon.jit
def _load_h(  # type: ignore[no-untyped-def]
    h, pair, n, end, F: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """h of a piece: of the gate, and of up; or both as they lie, twice; without a gate h, twice."""
    row = pair.to(gl.int64)[:, None] * WIDTH
    live = (pair < end)[:, None]
    if INTERLEAVED:
        column = n * (2 * BN) + gl.arange(0, 2 * BN, layout=gl.SliceLayout(0, layout))
        both = gl.load(h + row + column[None, :], mask=live & (column < WIDTH)[None, :], other=0.0)
        return both, both
    else:
        column = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        mask = live & (column < F)[None, :]
        gate = gl.load(h + row + column[None, :], mask=mask, other=0.0)
        up = gate
        if GATED:
            up = gl.load(h + row + F + column[None, :], mask=mask, other=0.0)
        return gate, up


@gluon.jit
def _finish(  # type: ignore[no-untyped-def]
    tiles, heights, pieces, given, taken, factors, order, h, dh, scaled, partial, pairs, F: gl.constexpr,
    WIDTH: gl.constexpr, NAME: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, HAS_LIMIT: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr, WANTS_SCALED: gl.constexpr, ACROSS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """The activation's backward of every tile of this program, piece by piece."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    of_h: gl.constexpr = wide if INTERLEAVED else by_row
    EACH: gl.constexpr = BM // PIECE // 2
    turn0 = 0
    turn1 = 0
    step = gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_row))
    step_h = gl.arange(0, PIECE, layout=gl.SliceLayout(1, of_h))
    for tile in range(gl.program_id(0), heights * ACROSS, gl.num_programs(0)):
        _, first, end, n = _place(tiles, tile, heights, ACROSS, BAND)
        end = gl.minimum(end, first + BM)
        number = (end - first + PIECE - 1) // PIECE
        # What a piece needs is asked for while the one before it is computed: h, and its pairs' weights, whose places
        # are asked for one piece earlier still.
        gate16, up16 = _load_h(h, first + step_h, n, end, F, WIDTH, GATED, INTERLEAVED, BN, of_h)
        entry = gl.load(order + first + step, mask=first + step < end, other=0)
        next_entry = gl.load(order + first + PIECE + step, mask=first + PIECE + step < end, other=0)
        factor = gl.load(factors + entry, mask=first + step < end, other=0.0)
        for i in range(0, number):
            pair = first + i * PIECE + step
            next_gate, next_up = _load_h(
                h, first + (i + 1) * PIECE + step_h, n, end, F, WIDTH, GATED, INTERLEAVED, BN, of_h
            )
            next_factor = gl.load(factors + next_entry, mask=pair + PIECE < end, other=0.0)
            next_entry = gl.load(order + pair + 2 * PIECE, mask=pair + 2 * PIECE < end, other=0)
            if i == 0:
                mbarrier.wait(given.index(0), turn0)
                turn0 ^= 1
            if i == EACH:
                mbarrier.wait(given.index(1), turn1)
                turn1 ^= 1
            grad = pieces.index(i).load(by_row).to(gl.float32)
            if i == gl.minimum(EACH, number) - 1:
                mbarrier.arrive(taken.index(0))
            if (i == number - 1) & (i >= EACH):
                mbarrier.arrive(taken.index(1))
            if INTERLEAVED:
                gate, up = gl.split(gate16.to(gl.float32).reshape([PIECE, BN, 2]))
                gate = gl.convert_layout(gate, by_row)
                up = gl.convert_layout(up, by_row)
            else:
                gate = gate16.to(gl.float32)
                up = up16.to(gl.float32)
            times = factor[:, None]
            value, dgate, dup = _slopes(gate, up, grad * times, NAME, GATED, HAS_LIMIT, LIMIT, ALPHA, SHIFT)
            row = pair.to(gl.int64)[:, None]
            column = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, by_row))
            mask = (pair < end)[:, None] & (column < F)[None, :]
            if INTERLEAVED:
                both = gl.convert_layout(gl.join(dgate, dup).reshape([PIECE, 2 * BN]).to(gl.bfloat16), wide)
                pair_h = first + i * PIECE + step_h
                twice = n * (2 * BN) + gl.arange(0, 2 * BN, layout=gl.SliceLayout(0, wide))
                mask_h = (pair_h < end)[:, None] & (twice < WIDTH)[None, :]
                gl.store(dh + pair_h.to(gl.int64)[:, None] * WIDTH + twice[None, :], both, mask=mask_h)
            else:
                gl.store(dh + row * WIDTH + column[None, :], dgate.to(gl.bfloat16), mask=mask)
                if GATED:
                    gl.store(dh + row * WIDTH + F + column[None, :], dup.to(gl.bfloat16), mask=mask)
            if WANTS_SCALED:
                gl.store(scaled + row * F + column[None, :], (value * times).to(gl.bfloat16), mask=mask)
            gl.store(partial + n.to(gl.int64) * pairs + pair, gl.sum(grad * value, 1), mask=pair < end)
            gate16 = next_gate
            up16 = next_up
            factor = next_factor


@quick
@gluon.jit(do_not_specialize=["pairs"])
def _dact(  # type: ignore[no-untyped-def]
    address, weight, inner, thin, factors, order, h, start, dh, scaled, partial, tiles, pairs, Q: gl.constexpr,
    H: gl.constexpr, F: gl.constexpr, WIDTH: gl.constexpr, NAME: gl.constexpr, GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr, HAS_LIMIT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr,
    HAS_START: gl.constexpr, WANTS_SCALED: gl.constexpr, K_FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, LOADING: gl.constexpr,
    MULTIPLYING: gl.constexpr, FINISHING: gl.constexpr,
):  # fmt: skip
    ACROSS: gl.constexpr = (F + BN - 1) // BN
    DEPTH: gl.constexpr = H + BK if Q else H
    heights = gl.load(tiles)
    if HAS_START:
        begin = gl.load(start)
        h += gl.multiple_of(begin, 16)
        # Without room in the arena there is no h, and nothing to be made of it.
        heights = gl.where(begin < 0, 0, heights)
    a, b, sums, pieces, full, empty, given, taken = _buffers(K_FIRST, BM, BN, BK, STAGES, PIECE)
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, heights, a, b, sums, full, empty, given, taken, DEPTH, ACROSS, K_FIRST, BM, BN, BK, BAND,
                STAGES,
            )),
            (_multiply, (
                1, tiles, heights, a, b, sums, full, empty, given, taken, DEPTH, ACROSS, K_FIRST, BM, BN, BK, BAND,
                STAGES,
            )),
            (_load, (
                address, weight, inner, thin, tiles, heights, a, b, full, empty, H, F, Q, ACROSS, K_FIRST, BM, BN, BK,
                BAND, STAGES,
            )),
            (_finish, (
                tiles, heights, pieces, given, taken, factors, order, h, dh, scaled, partial, pairs, F, WIDTH, NAME,
                GATED, INTERLEAVED, HAS_LIMIT, LIMIT, ALPHA, SHIFT, WANTS_SCALED, ACROSS, BM, BN, BAND, PIECE,
            )),
        ],
        [4, 4, 4], [MULTIPLYING, LOADING, FINISHING],
    )  # fmt: skip


def takes(down_weight: torch.Tensor, transposed: bool, share: Share | None = None) -> bool:
    """Whether this kernel computes the stage with these matrices: bf16, on Hopper, H a multiple of a step, and an
    adapter's rank no more than one."""
    _, hidden = in_out(down_weight, transposed)
    if share is not None and (share.inner_PQ.shape[1] % 8 or share.inner_PQ.shape[1] > DEPTH):
        return False
    if down_weight.dtype != torch.bfloat16 or not down_weight.is_cuda or hidden % DEPTH:
        return False
    return torch.cuda.get_device_capability(down_weight.device)[0] == 9


def down_backward(
    address_P: torch.Tensor,
    down_weight: torch.Tensor,
    transposed: bool,
    activation: Activation,
    h: HiddenStates,
    weight_RJ: torch.Tensor,
    order_P: torch.Tensor,
    tiles_M4: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    share: Share | None = None,
) -> None:
    """As `dact_kernels.down_backward`, where `takes` says so, of rows that are there."""
    inner, hidden = in_out(down_weight, transposed)
    pairs = address_P.shape[0]
    dh_PF1, scaled_PF, share_NP = out
    weight = thin = _describe(down_weight, transposed)
    rank = 0
    if share is not None:
        rank = share.inner_PQ.shape[1]
        thin = _describe(share.factor.transpose(1, 2).contiguous() if transposed else share.factor, transposed)
    _dact[(processors(dh_PF1.device),)](
        address_P, weight, dh_PF1 if share is None else share.inner_PQ, thin, weight_RJ, order_P, h.data,
        tiles_M4 if h.start is None else h.start, dh_PF1, scaled_PF, share_NP, tiles_M4, pairs, Q=rank, H=hidden,
        F=inner, WIDTH=h.width, **constants(activation), HAS_START=h.start is not None, WANTS_SCALED=len(scaled_PF) > 0,
        K_FIRST=not transposed, BM=TILE_ROWS, BN=COLUMNS, BK=DEPTH, BAND=BAND, STAGES=STAGES, PIECE=PIECE,
        LOADING=LOADING_REGISTERS, MULTIPLYING=MULTIPLYING_REGISTERS, FINISHING=FINISHING_REGISTERS, num_warps=4,
    )  # fmt: skip


def _describe(weight: torch.Tensor, transposed: bool) -> TensorDescriptor:
    """All experts' matrices as one."""
    block = [COLUMNS, DEPTH] if transposed else [DEPTH, COLUMNS]
    flat = aligned(weight).view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(flat, block, gl.NVMMASharedLayout(128, 16, 2))
