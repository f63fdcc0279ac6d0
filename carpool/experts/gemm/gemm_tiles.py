"""Tiles of the fused grouped products: which there are, in what order, and how what they read is loaded.

    up_kernels.py        x where it lies @ up (+ bias)  ->  h, to where it is kept, and a = act(h)
    product_kernels.py   a @ down, dh @ up^T            ->  one row per pair, which `sum_pairs` adds up
    dact_kernels.py      dy where it lies @ down^T      ->  dh, weight * a, and shares of <dA, a>; in flat tiles by
                         dact_hopper_kernels.py
    outer_kernels.py     dh^T @ x, dy^T @ (weight * a)  ->  gradients of the matrices, which are what its tiles are of

A tile is 128 pairs of one expert x 256 columns, computed by 8 warps in steps of 64 (32 where a card has 99 KiB of
shared memory for a program, not Hopper's 227: `tiling`). Which tiles there are only the device knows:
`table_kernels.tile_table` lists them once, for all stages of forward and backward. A persistent grid walks

    bands of 16 tiles of pairs, in a band column by column, in a column tile by tile

so that programs that run together read the same columns of the same expert and the same rows, and L2 serves most of it.
(A tile of 128 x 256 does 43 multiply-adds for each byte that it reads, one of 128 x 128 only 32, and nothing is shared
between multiprocessors: L2 is the limit to watch. A larger tile does not fit into the registers of 8 warps.)

    example   pairs of slots 0, 1, 2: 3, 0, 5; tiles of 4 rows; N = 2 tiles of columns; bands of 2
    table     (slot 0, pairs 0-2), (slot 2, pairs 3-6), (slot 2, pair 7)
    order     (tile 0, column 0) (1, 0) (0, 1) (1, 1) | (2, 0) (2, 1)

Rows of pairs need no copy: `table_kernels.row_addresses` says where the row of each pair begins (in the transport's
buffer, in the arena, among a rank's own tokens), once for all tiles, and a tile loads its 128 addresses, then pieces of
16 bytes from there into shared memory (cp.async). Matrices, and rows that lie in order, come by tensor maps (TMA), on
cards before Hopper by cp.async, too. Steps past a matrix's edge read zeros; rows past an expert's last are read where
they are harmless and never stored.

Rows that come in parts (`carpool_systems.tiles`) are read while later parts are under way: up and dact walk the tiles
of one part after the other, and before each part every program waits until it is there. The waits stand between loops
of tiles, because a flattened loop loads the next tile before this one is done. Parts continue each
other's turns, so no program is idle while a part ends. down and dx take the tiles of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from carpool.experts.gemm.table_kernels import aligned
from carpool.kernels import MAX_CTAS, Awaited
from carpool.kernels.device import processors
from carpool.kernels.quick import power_of_2
from carpool.kernels.signals import SPIN

TILE_ROWS = 128
BAND = 16


@triton.jit
def _place(tiles, tile, heights, COLUMNS: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile: its expert, pairs and which of them are the expert's, and its column."""
    band = tile // (BAND * COLUMNS)
    height = tl.minimum(heights - band * BAND, BAND)
    within = tile - band * (BAND * COLUMNS)
    entry = tiles + (1 + band * BAND + within % height) * 4
    first = tl.load(entry + 1)
    pair = first + tl.arange(0, BM)
    return tl.load(entry), first, pair, pair < tl.load(entry + 2), within // height


@triton.jit
def _of_part(starts, part, before):  # type: ignore[no-untyped-def]
    """Of a part: its first tile of pairs, how many there are, and this program's first, where `before` tiles have been
    dealt out in turn."""
    programs = tl.num_programs(0)
    first = tl.load(starts + part)
    mine = (tl.program_id(0) + programs - before % programs) % programs
    return first, tl.load(starts + part + 1) - first, mine


@triton.jit
def _load_b(  # type: ignore[no-untyped-def]
    weight, expert, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, K_FIRST: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """(BK, BN) of an expert's matrix, which lies as (K, N) if K_FIRST, else as (N, K). Zero past its edges."""
    if not MAPS:
        column = n + tl.arange(0, BN)
        return _load_columns(weight, expert, column, column < N, k, N, K, BK, K_FIRST)
    elif K_FIRST:
        return weight.load([expert, k, n]).reshape(BK, BN)
    else:
        return weight.load([expert, n, k]).reshape(BN, BK).T


@triton.jit
def _load_columns(  # type: ignore[no-untyped-def]
    weight, expert, column, inside, k, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, K_FIRST: tl.constexpr
):
    """As `_load_b` of these columns, without a tensor map."""
    step = k + tl.arange(0, BK)
    at = step[:, None] * N + column[None, :] if K_FIRST else column[None, :] * K + step[:, None]
    mask = inside[None, :] & (step < K)[:, None] if K % BK != 0 else inside[None, :]
    return tl.load(weight + expert.to(tl.int64) * (N * K) + at, mask=mask, other=0.0)


@triton.jit
def _load_rows(address, k, K: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k to k + BK of the rows at these addresses; zero where the address is 0, and past K."""
    # Made into pointers here, after adding k, so that the compiler finds the alignment beside the load that needs it.
    row = tl.multiple_of((address + k * (DTYPE.primitive_bitwidth // 8)).to(tl.pointer_type(DTYPE)), 16)
    column = tl.arange(0, BK)
    mask = (address != 0)[:, None]
    if K % BK != 0:
        mask = mask & (k + column < K)[None, :]
    return tl.load(row[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _share(  # type: ignore[no-untyped-def]
    inner, factor, expert, pair, live, column, inside, Q: tl.constexpr, N: tl.constexpr, Q_LAST: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """An adapter's share in a tile: the pairs' rows of `inner` (P, Q) times the expert's factor, (S, N, Q) if Q_LAST,
    else (S, Q, N), of these columns (`adapter_kernels.py`), BQ of Q at a time. float32."""
    for first in tl.static_range(0, Q, BQ):
        q = first + tl.arange(0, BQ)
        u = tl.load(
            inner + pair.to(tl.int64)[:, None] * Q + q[None, :], mask=live[:, None] & (q < Q)[None, :], other=0.0
        )  # fmt: skip
        at = column[None, :] * Q + q[:, None] if Q_LAST else q[:, None] * N + column[None, :]
        there = (q < Q)[:, None] & inside[None, :]
        b = tl.load(factor + expert.to(tl.int64) * (Q * N) + at, mask=there, other=0.0)
        if first == 0:
            total = tl.dot(u, b, input_precision="ieee")
        else:
            total = tl.dot(u, b, total, input_precision="ieee")
    return total


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and the right half of the columns; no data moves between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@dataclass(frozen=True)
class Tiling:
    """How the products are cut: tiles of TILE_ROWS pairs x `columns`, BK deep.

    Attributes:
        columns: of a tile, gate and up counted.
        warps, stages: of a program; how many steps are in shared memory.
        programs: on one multiprocessor.
        flatten: the loads of the next tile start before the results of this one are written.
    """

    columns: int
    warps: int
    stages: int
    programs: int = 1
    flatten: bool = False
    depth: int = 64


TILINGS = {
    "wide": Tiling(256, 8, 4),
    "flat": Tiling(256, 8, 4, flatten=True),
    "square": Tiling(128, 4, 3, programs=2),
}
# Of cards with less than AMPLE bytes of shared memory for a program: all but those for data centres have 99 KiB.
AMPLE = 160 * 1024
SMALL_TILINGS = {
    "wide": Tiling(256, 8, 4, depth=32),
    "flat": Tiling(256, 8, 4, flatten=True, depth=32),
    "square": Tiling(128, 4, 4, programs=2, depth=32),
}
HOPPER = 227 * 1024


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: 227 KiB on Hopper, 163 on an A100, 99 on most other cards."""
    if device.type != "cuda":
        return HOPPER
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache
def has_maps(device: torch.device) -> bool:
    """Whether matrices are read by tensor maps, as Hopper and later cards can; in the interpreter they are."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def tiling(way: str, device: torch.device) -> Tiling:
    """The tiling that this way (`choices.py`) means on this device."""
    return (TILINGS if shared_memory(device) >= AMPLE else SMALL_TILINGS)[way]


def stages_beside(tiling: Tiling, rank: int, device: torch.device) -> int:
    """How many steps are in shared memory beside an adapter's share of this rank (padded). Before Hopper, and on
    consumers' cards after it, tensor cores take the share from registers, and it frees its memory before the steps."""
    if shared_memory(device) < HOPPER:
        return tiling.stages
    return min(tiling.stages, 4 if rank == 16 else 3 if rank <= 64 else 2)


def depth_that_fits(across: int, depth: int, stages: int, device: torch.device) -> int:
    """Of steps of bfloat16, `across` x depth: at most so deep, and that all stages are in shared memory."""
    while depth > 16 and 2 * across * depth * stages > shared_memory(device):
        depth //= 2
    return depth


class Parts(NamedTuple):
    """Rows that are under way in parts.

    Attributes:
        starts_N: their tiles (`table_kernels.tile_table`).
        awaited: what to wait with.
    """

    number: int
    starts_N: torch.Tensor
    awaited: Awaited


def waits(parts: Parts | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """What a kernel that waits is given."""
    return (unused,) * 5 + (0,) * 5 if parts is None else (parts.starts_N, *parts.awaited, parts.number)


def waits_for(parts: Parts | None) -> dict[str, int]:
    """What a kernel that waits is compiled for: the same for all numbers of parts and programs."""
    pad = 1 if parts is None else power_of_2(parts.awaited.sources) * MAX_CTAS
    return {"AWAITED": parts is not None, "STRIDE": MAX_CTAS, "PAD": pad, "SPIN": SPIN}


def in_out(weight: torch.Tensor, in_first: bool) -> tuple[int, int]:
    """Widths of what an expert's matrix reads and gives: it lies as (S, in, out) if `in_first`, else (S, out, in)."""
    return (weight.shape[1], weight.shape[2]) if in_first else (weight.shape[2], weight.shape[1])


def describe(tensor: torch.Tensor, shape: Sequence[int], block: tuple[int, ...]) -> TensorDescriptor | torch.Tensor:
    """What a kernel reads these values by: a tensor map of blocks, or where there is none their address."""
    seen = aligned(tensor).view(shape)
    return TensorDescriptor.from_tensor(seen, list(block)) if has_maps(tensor.device) else seen


def grid(out: torch.Tensor, tiling: Tiling) -> tuple[int]:
    if not out.is_cuda:
        return (2,)
    return (processors(out.device) * tiling.programs,)
