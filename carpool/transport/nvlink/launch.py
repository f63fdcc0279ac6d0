"""Launches the kernels with their tile sizes and arguments. Imports Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from carpool.kernels import MAX_CTAS, MAX_PARTS
from carpool.kernels.quick import cdiv, power_of_2
from carpool.kernels.signals import SPIN
from carpool.transport.nvlink.buffers import VERBS, Buffers, Lease, SharedMemory
from carpool.transport.nvlink.combine_kernel import combine_kernel
from carpool.transport.nvlink.dispatch_kernel import choices_kernel, dispatch_kernel
from carpool.transport.nvlink.peer_slots_kernel import gate_kernel, loads_kernel, push_kernel, sum_kernel
from carpool.transport.nvlink.plan_kernel import plan_kernel

if TYPE_CHECKING:
    from carpool.activations import Ready
    from carpool.transport.nvlink.route import NVLinkRoute

# Small in the interpreter, so that a plan of few tokens has several blocks there too.
PLAN_BLOCK = 512 if SPIN else 64
# Programs that send choices ahead of tokens: a computation waits for them.
CHOICE_CTAS = 32 if SPIN else 3
# Programs that send experts to spare slots, beside a dispatch, and that add up gradients, beside little: each waits for
# what it has asked of a peer, so that the link is full only with many. Words of a program's step.
FETCH_CTAS, SUM_CTAS = (8, MAX_CTAS) if SPIN else (3, 2)
SLOT_BLOCK = 8192 if SPIN else 64
INT32_MAX = 2**31 - 1


def launch_plan(
    slot_TK: torch.Tensor, buffers: Buffers, slots_per_rank: int, parts: int = 0, length: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_WT, count_2W, choices_BW, begins_NW) of `plan_kernel`."""
    tokens, top_k = slot_TK.shape
    num_ranks = buffers.num_ranks
    blocks = max(1, cdiv(tokens, PLAN_BLOCK))
    row_WT = slot_TK.new_empty(num_ranks, tokens)
    count_2W = slot_TK.new_empty(2, num_ranks)
    choices_BW = slot_TK.new_empty(blocks, num_ranks)
    begins_NW = slot_TK.new_empty(parts + 1, num_ranks) if parts else count_2W
    plan_kernel[(blocks,)](
        slot_TK, row_WT, count_2W, choices_BW, begins_NW, tokens, buffers.capacity, buffers.most, buffers.rank, length,
        parts,
        S=max(1, slots_per_rank), K=top_k, KP=power_of_2(top_k), W=num_ranks,
        BLOCK=PLAN_BLOCK, AHEAD=8 * PLAN_BLOCK,
        FIELDS=4 if tokens < 2**16 else 2, PARTED=parts > 0, PP=power_of_2(MAX_PARTS + 1), num_warps=16,
    )  # fmt: skip
    return row_WT, count_2W, choices_BW, begins_NW


def launch_choices(
    route: NVLinkRoute,
    ready: Ready,
    lease: Lease,
    slot_RJ: torch.Tensor,
    weight_RJ: torch.Tensor,
    buffers: Buffers,
    rank: int,
    slots_per_rank: int,
    send: bool,
    receive: bool,
) -> None:
    """Send the choices of a dispatch in parts, ahead of its tokens; fills `ready`."""
    assert route.begins_NW is not None
    tokens, top_k = route.slot_TK.shape
    num_ranks, at = buffers.num_ranks, lease.regions
    choices_kernel[(CHOICE_CTAS,)](
        route.slot_TK, route.weight_TK, route.row_WT, route.count_2W, route.begins_NW, lease.bases, lease.epochs,
        buffers.status, buffers.host_status, buffers.needed, slot_RJ, weight_RJ, ready.group_RJ, ready.begins_NW,
        route.received_W, tokens, at.capacity, at.most, rank, int(1e9 * buffers.timeout_seconds),
        VERBS.index("dispatch"), ready.parts, at.choices, at.counts, at.begins, at.chosen,
        S=max(1, slots_per_rank), K=top_k, KP=power_of_2(top_k), W=num_ranks, WP=power_of_2(num_ranks),
        PP=power_of_2(MAX_PARTS + 1), CTAS=CHOICE_CTAS, MAX_CTAS=MAX_CTAS,
        PAD=power_of_2(num_ranks * CHOICE_CTAS), BC=max(16, 4096 // power_of_2(top_k)),
        BU=max(16, 8192 // power_of_2(top_k)), SEND=send, RECEIVE=receive, SPIN=SPIN, num_warps=32,
    )  # fmt: skip


def launch_dispatch(
    x_TH: torch.Tensor,
    route: NVLinkRoute,
    lease: Lease,
    tally: torch.Tensor,
    slot_RJ: torch.Tensor | None,
    weight_RJ: torch.Tensor | None,
    buffers: Buffers,
    ctas: int,
    rank: int,
    slots_per_rank: int,
    main_words: int,
    send: bool,
    receive: bool,
) -> None:
    words = x_TH.shape[1] * x_TH.element_size() // 4
    main = main_words or words
    tokens, top_k = route.slot_TK.shape
    num_ranks, at = buffers.num_ranks, lease.regions
    choices = slot_RJ is not None
    tile = dispatch_tile(main, words - main)
    capacity = lease.regions.capacity
    # The roles of the programs must be the same on all ranks, so they depend on the shared capacity, not on the tokens.
    # If choices are sent ahead, all programs send tokens.
    others = 0 if ctas < 12 or route.parts else min(8, ctas - 8) if capacity >= 1024 else 1
    rows = ctas - others
    dispatch_kernel[(ctas if choices else rows,)](
        x_TH.view(torch.int32), route.slot_TK, route.weight_TK, route.row_WT, route.count_2W,
        route.choices_BW, lease.bases, lease.epochs, buffers.status, buffers.host_status, buffers.needed, tally,
        slot_RJ if choices else route.slot_TK, weight_RJ if choices else route.weight_TK, route.received_W,
        tokens, route.choices_BW.shape[0], capacity, lease.regions.most, rank, int(1e9 * buffers.timeout_seconds),
        VERBS.index("dispatch_gradients" if route.backward and not choices else "dispatch"), max(1, route.part_length),
        at.tokens, at.choices, at.counts, at.arrived,
        PITCH=words, MAIN=main, S=max(1, slots_per_rank), K=top_k, KP=power_of_2(top_k), W=num_ranks,
        WP=power_of_2(num_ranks), ROWS=rows, OTHERS=others if choices else 0, CHOICES=choices,
        PARTED=route.parts > 1, MAX_CTAS=MAX_CTAS,
        PAD=power_of_2(num_ranks * ctas), BC=max(16, 4096 // power_of_2(top_k)),
        BU=max(16, 8192 // power_of_2(top_k)), SEND=send, RECEIVE=receive, SPIN=SPIN, **tile,
    )  # fmt: skip


def dispatch_tile(main: int, tail: int) -> dict[str, int]:
    """Tile of the push, measured: 32 KiB per program and step, of the width that wastes least at the end of a row."""
    across = min((min(512, power_of_2(main)), 256, 128), key=lambda width: (-(-main // width) * width, -width))
    wide = power_of_2(max(1, tail))
    return {"BT": 8192 // across, "BH": across, "BT_TAIL": max(1, 8192 // wide), "BH_TAIL": wide, "num_warps": 32}


def launch_combine(
    y_TH: torch.Tensor,
    dweight_TK: torch.Tensor | None,
    route: NVLinkRoute,
    lease: Lease,
    tally: torch.Tensor,
    buffers: Buffers,
    ctas: int,
    rank: int,
    slots_per_rank: int,
    send: bool,
    receive: bool,
    part: int | None = None,
) -> None:
    """part: combine only the tokens of this part."""
    hidden, top_k = y_TH.shape[1], route.slot_TK.shape[1]
    weights, behind = dweight_TK is not None, 0
    slot_TK, row_WT = route.slot_TK, route.row_WT
    dweight_TK = route.weight_TK if dweight_TK is None else dweight_TK
    if part is not None:
        own = route.tokens_of(part)
        y_TH, slot_TK, row_WT, dweight_TK = y_TH[own], slot_TK[own], row_WT[:, own], dweight_TK[own]
        # The mark of the last part is the end of the ride.
        behind = 0 if part == route.parts - 1 else MAX_PARTS - part - 1
    num_ranks, at = buffers.num_ranks, lease.regions
    needed, most = (buffers.needed, INT32_MAX) if route.pairs is None else (route.pairs.needed, route.pairs.capacity)
    tile = combine_tile(hidden, y_TH.element_size())
    combine_kernel[(ctas,)](
        y_TH, dweight_TK, slot_TK, row_WT, route.count_2W, route.choices_BW, route.received_W, lease.bases,
        lease.epochs, buffers.status, buffers.host_status, buffers.needed, needed, tally, slot_TK.shape[0],
        route.row_WT.shape[1], behind, route.choices_BW.shape[0], at.capacity, most, rank,
        int(1e9 * buffers.timeout_seconds), VERBS.index("combine_gradients" if weights else "combine"),
        at.partial, at.dweight, at.written, *(lease.addresses * 4)[:4],
        H=hidden, S=max(1, slots_per_rank), K=top_k, KP=power_of_2(top_k), W=num_ranks, WP=power_of_2(num_ranks),
        BC=128, WEIGHTS=weights, SEND=send, RECEIVE=receive, SPIN=SPIN, **tile,
    )  # fmt: skip


def combine_tile(hidden: int, element_size: int) -> dict[str, int]:
    """Tile of the pull, measured: 32 KiB from each rank, all in flight at once in the registers of 1024 threads."""
    across = min(1024 // element_size, power_of_2(hidden))
    return {"BT": 32768 // element_size // across, "BH": across, "num_warps": 32}


def launch_gate(
    memory: SharedMemory,
    buffers: Buffers,
    verb: int,
    wait_at: int | None = None,
    send_at: int | None = None,
    each: int = 1,
    following: bool = False,
) -> None:
    """`gate_kernel`. following: begin the next epoch."""
    num_ranks = buffers.num_ranks
    gate_kernel[(1,)](
        memory.bases, memory.epoch, buffers.status, buffers.host_status, buffers.rank,
        int(1e9 * buffers.timeout_seconds), verb, wait_at or 0, send_at or 0, WAIT=wait_at is not None, NEXT=following,
        SEND=send_at is not None, W=num_ranks, WP=power_of_2(num_ranks), EACH=each, PAD=power_of_2(num_ranks * each),
        SPIN=SPIN, num_warps=4,
    )  # fmt: skip


def launch_loads(
    load_E: torch.Tensor,
    load_WE: torch.Tensor,
    memory: SharedMemory,
    buffers: Buffers,
    verb: int,
    came_at: int,
    loads_at: int,
    send: bool,
    receive: bool,
) -> None:
    num_ranks, experts = load_WE.shape
    loads_kernel[(1,)](
        load_E, load_WE, memory.bases, memory.epoch, buffers.status, buffers.host_status, buffers.rank,
        int(1e9 * buffers.timeout_seconds), verb, came_at, loads_at, E=experts, W=num_ranks, WP=power_of_2(num_ranks),
        BLOCK=min(1024, power_of_2(experts)), SEND=send, RECEIVE=receive, SPIN=SPIN, num_warps=8,
    )  # fmt: skip


def launch_push(
    rows: torch.Tensor,
    expert_WS: torch.Tensor,
    home_E: torch.Tensor,
    memory: SharedMemory,
    buffers: Buffers,
    homes: int,
    slots_at: int,
    came_at: int,
    last: bool,
) -> None:
    """Send rows (homes, ...) of this rank as the widest words of which each row is a multiple."""
    words = rows.view(rows.shape[0], math.prod(rows.shape[1:]))
    size, start = words.shape[1] * words.element_size(), words.storage_offset() * words.element_size()
    for dtype in (torch.int32, torch.int16, torch.uint8):
        if dtype.itemsize <= words.element_size() or (size % dtype.itemsize == 0 and start % dtype.itemsize == 0):
            break
    words = words.view(dtype)
    num_ranks, spare = expert_WS.shape
    push_kernel[(FETCH_CTAS,)](
        words, expert_WS, home_E, memory.bases, memory.epoch, buffers.rank, slots_at, came_at, ROW=words.shape[1],
        HOMES=homes, S=spare, W=num_ranks, WP=power_of_2(num_ranks), CTAS=FETCH_CTAS,
        BLOCK=min(SLOT_BLOCK, power_of_2(words.shape[1])), ALIGNED=math.gcd(16, slots_at), LAST=last, num_warps=32,
    )  # fmt: skip


def launch_sum(
    dhome: torch.Tensor,
    expert_WS: torch.Tensor,
    home_E: torch.Tensor,
    memory: SharedMemory,
    buffers: Buffers,
    verb: int,
    homes: int,
    slots_at: int,
    came_at: int,
    free_at: int,
    first: bool,
    last: bool,
) -> None:
    num_ranks, spare = expert_WS.shape
    row = math.prod(dhome.shape[1:])
    sum_kernel[(SUM_CTAS,)](
        dhome, expert_WS, home_E, memory.bases, memory.epoch, buffers.status, buffers.host_status, buffers.rank,
        int(1e9 * buffers.timeout_seconds), verb, slots_at, came_at, free_at, ROW=row, HOMES=homes, S=spare,
        W=num_ranks, WP=power_of_2(num_ranks), P=power_of_2(num_ranks * spare), CTAS=SUM_CTAS,
        BLOCK=min(SLOT_BLOCK, power_of_2(row)), FIRST=first, LAST=last, SPIN=SPIN, num_warps=16,
    )  # fmt: skip
