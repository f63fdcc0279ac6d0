"""The sums of outer_kernels.py on Hopper, by warps that load beside warps that multiply, one tile running into another.

Where an expert has few pairs, a tile of its gradient is a few products long: 230 pairs are four steps. Then it matters
that the next tile is loaded while this one is multiplied, and that results are stored while the next tile begins.
A program is three groups of four warps, one program to a multiprocessor:

    loads       steps of 64 pairs into a ring of 3: 128 columns of a, 256 of b. The operand that lies in order comes by
                TMA, the one that is gathered by cp.async, 16 bytes a thread
    multiplies  two groups, 64 rows of the tile each, which write their sums to shared memory; TMA takes them from there

    ring       | step 0 | step 1 | step 2 |        full[i]: 128 threads' copies have come, and TMA's bytes
    loads      4  ------------------------>        empty[i]: both groups have multiplied
    group 0        [mul][mul][mul][mul][hand over][mul] ...
    group 1           [mul][mul][mul][mul][hand over][mul] ...

Past a slot's last pair lie another slot's values, or garbage. Both operands of that last step come by cp.async, which
puts zeros there. Tiles are dealt out in turn, those of the slots with most pairs first, so programs end together.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from carpool.experts.gemm.gemm_tiles import BAND
from carpool.experts.gemm.table_kernels import aligned
from carpool.kernels.device import processors
from carpool.kernels.hopper_copies import load_rows, load_tile, store_tile
from carpool.kernels.quick import quick

HEIGHT, COLUMNS, DEPTH = 128, 256, 64
STAGES = 3
LOADING_REGISTERS = 72
MULTIPLYING_REGISTERS = 208


@gluon.jit
def _place(ranked, tile, M: gl.constexpr, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile: its slot, that slot's first pair and the one after its last, and the tile's first row and column."""
    rows: gl.constexpr = (M + BM - 1) // BM
    columns: gl.constexpr = (N + BN - 1) // BN
    entry = ranked + tile // (rows * columns) * 4
    within = tile % (rows * columns)
    band = within // (BAND * columns)
    height = gl.minimum(rows - band * BAND, BAND)
    within = within % (BAND * columns)
    m = (band * BAND + within % height) * BM
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), m, within // height * BN


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    shared, address, first, live, WIDTH: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr, piece: gl.constexpr
):
    """BLOCK columns from `first`, of a tile's TILE, of the rows at these addresses; zeros where a row is not live, and
    past WIDTH: all of a last tile's second half may lie there, and past a tensor's last row there may be no memory."""
    column = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, piece))
    row = gl.multiple_of(address.to(gl.pointer_type(gl.bfloat16)), 16)
    mask = live[:, None]
    if WIDTH % TILE != 0:
        mask = mask & (column < WIDTH)[None, :]
    load_rows(shared, row[:, None] + gl.max_contiguous(gl.multiple_of(column, 8), 8)[None, :], mask)


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    addresses, values, values_map, ranked, tiles, a, b, full, empty, M: gl.constexpr, N: gl.constexpr,
    GATHER_A: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Every step of every tile of this program, as room comes free."""
    piece: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half: gl.constexpr = BM // 2
    WIDTH: gl.constexpr = N if GATHER_A else M
    step = gl.arange(0, BK, layout=gl.SliceLayout(1, piece))
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, begin, end, m, n = _place(ranked, tile, M, N, BM, BN, BAND)
        address = gl.load(addresses + begin + step, mask=begin + step < end, other=0)
        for first in range(begin, end, BK):
            pair = first + step
            following = gl.load(addresses + pair + BK, mask=pair + BK < end, other=0)
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            if GATHER_A:
                _copy(a.index(2 * stage), address, m, address != 0, M, half, BM, piece)
                _copy(a.index(2 * stage + 1), address, m + half, address != 0, M, half, BM, piece)
            else:
                _copy(b.index(stage), address, n, address != 0, N, BN, BN, piece)
            if first + BK <= end:
                if GATHER_A:
                    mbarrier.expect(ready, BK * BN * 2)
                    load_tile(values_map, [first, n], ready, b.index(stage))
                else:
                    mbarrier.expect(ready, BK * BM * 2)
                    load_tile(values_map, [first, m], ready, a.index(2 * stage))
                    load_tile(values_map, [first, m + half], ready, a.index(2 * stage + 1))
            else:
                at = values.to(gl.int64) + pair.to(gl.int64) * (WIDTH * 2)
                if GATHER_A:
                    _copy(b.index(stage), at, n, pair < end, N, BN, BN, piece)
                else:
                    _copy(a.index(2 * stage), at, m, pair < end, M, half, BM, piece)
                    _copy(a.index(2 * stage + 1), at, m + half, pair < end, M, half, BM, piece)
                mbarrier.arrive(ready)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            address = following
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, out_map, ranked, tiles, a, b, sums, full, empty, M: gl.constexpr, N: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of half WHICH of every tile."""
    half: gl.constexpr = BM // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    own = sums.index(WHICH)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot, begin, end, m, n = _place(ranked, tile, M, N, BM, BN, BAND)
        total = gl.zeros([half, BN], gl.float32, mma)
        for _ in range(begin, end, BK):
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            total = warpgroup_mma(a.index(2 * stage + WHICH).permute((1, 0)), b.index(stage), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        tma.store_wait(0)
        own.store(total.to(gl.bfloat16))
        fence_async_shared()
        if m + WHICH * half < M:
            store_tile(out_map, [slot * M + m + WHICH * half, n], own)
    tma.store_wait(0)


@quick
@gluon.jit
def _outer(  # type: ignore[no-untyped-def]
    addresses, values, values_map, out_map, ranked, tiles, M: gl.constexpr, N: gl.constexpr, GATHER_A: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    LOADING: gl.constexpr, MULTIPLYING: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BK, BM // 2], shared)
    b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], shared)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, BM // 2, BN], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each thread that loads arrives when its copies have, and one more of them speaks for what TMA brings.
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out_map, ranked, tiles, a, b, sums, full, empty, M, N, BM, BN, BK, BAND, STAGES)),
            (_multiply, (1, out_map, ranked, tiles, a, b, sums, full, empty, M, N, BM, BN, BK, BAND, STAGES)),
            (_load, (
                addresses, values, values_map, ranked, tiles, a, b, full, empty, M, N, GATHER_A, BM, BN, BK, BAND,
                STAGES,
            )),
        ],
        [4, 4], [MULTIPLYING, LOADING],
    )  # fmt: skip


def takes(out_SMN: torch.Tensor, addresses: int) -> bool:
    """Whether this kernel computes such sums: bf16, on Hopper, one operand gathered, whole halves of tiles in a slot.

    Args:
        addresses: how many of the two operands are.
    """
    if out_SMN.dtype != torch.bfloat16 or not out_SMN.is_cuda or addresses != 1:
        return False
    rows, columns = out_SMN.shape[1:]
    on_hopper = torch.cuda.get_device_capability(out_SMN.device)[0] == 9
    return on_hopper and rows % (HEIGHT // 2) == 0 and columns % 8 == 0


def launch(a: torch.Tensor, b: torch.Tensor, ranked_S4: torch.Tensor, out_SMN: torch.Tensor) -> None:
    """As `outer_kernels.outer`, whose arguments these are, where `takes` says so."""
    slots, m, n = out_SMN.shape
    gathered_a = a.dim() == 1
    addresses, values = (a, aligned(b)) if gathered_a else (b, aligned(a))
    tiles = slots * -(-m // HEIGHT) * -(-n // COLUMNS)
    _outer[(min(processors(out_SMN.device), tiles),)](
        addresses, values, _describe(values, DEPTH, COLUMNS if gathered_a else HEIGHT // 2),
        _describe(out_SMN.view(slots * m, n), HEIGHT // 2, COLUMNS), ranked_S4, tiles, M=m, N=n, GATHER_A=gathered_a,
        BM=HEIGHT, BN=COLUMNS, BK=DEPTH, BAND=BAND, STAGES=STAGES, LOADING=LOADING_REGISTERS,
        MULTIPLYING=MULTIPLYING_REGISTERS, num_warps=4,
    )  # fmt: skip


def _describe(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], gl.NVMMASharedLayout(128, 16, 2))
