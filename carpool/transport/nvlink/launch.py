"""How the kernels are launched: tile sizes, and what they are called with. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from carpool.transport.nvlink.buffers import MAX_CTAS, VERBS, Buffers, Lease
from carpool.transport.nvlink.combine_kernel import combine_kernel
from carpool.transport.nvlink.dispatch_kernel import dispatch_kernel
from carpool.transport.nvlink.fp8_kernel import dequantise_kernel
from carpool.transport.nvlink.plan_kernel import plan_kernel

if TYPE_CHECKING:
    from carpool.transport.nvlink.transport import NVLinkRoute

# In the interpreter no program may wait for another: everything it waits for has been sent before.
SPIN = not triton.knobs.runtime.interpret
PLAN_BLOCK = 512


def power(n: int) -> int:
    return max(1, triton.next_power_of_2(n))


def launch_plan(
    slot_TK: torch.Tensor, capacity: int, rank: int, num_ranks: int, slots_per_rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_WT, count_2W, choices_BW) of `plan_kernel`."""
    tokens, top_k = slot_TK.shape
    blocks = max(1, triton.cdiv(tokens, PLAN_BLOCK))
    row_WT = slot_TK.new_empty(num_ranks, tokens)
    count_2W = slot_TK.new_empty(2, num_ranks)
    choices_BW = slot_TK.new_empty(blocks, num_ranks)
    plan_kernel[(blocks,)](
        slot_TK, row_WT, count_2W, choices_BW, tokens, capacity, rank,
        S=max(1, slots_per_rank), K=top_k, KP=power(top_k), W=num_ranks,
        BLOCK=PLAN_BLOCK, AHEAD=8 * PLAN_BLOCK,
        FIELDS=4 if tokens < 2**16 else 2, num_warps=16,
    )  # fmt: skip
    return row_WT, count_2W, choices_BW


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
    fp8: bool,
    send: bool,
    receive: bool,
) -> None:
    hidden, words = x_TH.shape[1], x_TH.shape[1] * x_TH.element_size() // 4
    tokens, top_k = route.slot_TK.shape
    num_ranks, at = buffers.num_ranks, lease.regions
    choices = slot_RJ is not None
    tile = dispatch_tile(hidden if fp8 else words, fp8)
    capacity = route.num_rows // num_ranks
    # All ranks must agree on who does what, so it depends on the capacity, which they share, not on the tokens.
    others = min(max(1, ctas // 2), triton.cdiv(capacity, 1024))
    rows = ctas - others
    dispatch_kernel[(ctas if choices else rows,)](
        x_TH if fp8 else x_TH.view(torch.int32), route.slot_TK, route.weight_TK, route.row_WT, route.count_2W,
        route.choices_BW, lease.bases, lease.epochs, buffers.status, buffers.host_status, buffers.needed, tally,
        slot_RJ if choices else route.slot_TK, weight_RJ if choices else route.weight_TK, route.received_W,
        tokens, route.choices_BW.shape[0], capacity, rank, int(1e9 * buffers.timeout_seconds),
        VERBS.index("dispatch" if choices else "dispatch_gradients"),
        at.rows, at.scales, at.choices, at.counts, at.arrived,
        H=hidden, HW=words, S=max(1, slots_per_rank), K=top_k, KP=power(top_k), W=num_ranks, WP=power(num_ranks),
        ROWS=rows, CHOICES=others if choices else 0, MAX_CTAS=MAX_CTAS, PAD=power(num_ranks * ctas),
        BC=max(16, 4096 // power(top_k)), BU=max(16, 8192 // power(top_k)), FP8=fp8, SEND=send, RECEIVE=receive,
        SPIN=SPIN, **tile,
    )  # fmt: skip


def dispatch_tile(width: int, fp8: bool) -> dict[str, int]:
    """Tile of the push, measured: 32 KiB per program and step."""
    if fp8:
        across = max(128, min(512, power(width)))
        return {"BT": 16384 // across, "BH": across, "num_warps": 32}
    across = min(512, power(width))
    return {"BT": 8192 // across, "BH": across, "num_warps": 32}


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
) -> None:
    hidden = y_TH.shape[1]
    tokens, top_k = route.slot_TK.shape
    num_ranks, at = buffers.num_ranks, lease.regions
    weights = dweight_TK is not None
    tile = combine_tile(hidden, y_TH.element_size())
    combine_kernel[(ctas,)](
        y_TH, dweight_TK if weights else route.weight_TK, route.slot_TK, route.row_WT, route.count_2W,
        route.choices_BW, route.received_W, lease.bases, lease.epochs, buffers.status, buffers.host_status,
        buffers.needed, tally,
        tokens, route.choices_BW.shape[0], route.num_rows // num_ranks, rank, int(1e9 * buffers.timeout_seconds),
        VERBS.index("combine_gradients" if weights else "combine"),
        at.partial, at.dweight, at.written,
        H=hidden, S=max(1, slots_per_rank), K=top_k, KP=power(top_k), W=num_ranks, WP=power(num_ranks), BC=128,
        WEIGHTS=weights, SEND=send, RECEIVE=receive, SPIN=SPIN, **tile,
    )  # fmt: skip


def combine_tile(hidden: int, element_size: int) -> dict[str, int]:
    """Tile of the pull, measured: 32 KiB from each rank, all of it under way at once in 1024 threads' registers."""
    across = min(1024 // element_size, power(hidden))
    return {"BT": 32768 // element_size // across, "BH": across, "num_warps": 32}


def launch_dequantise(
    code_RH: torch.Tensor, scale_RG: torch.Tensor, received_W: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(R, H) rows in `dtype`; those that did not come are not written."""
    rows, hidden = code_RH.shape
    out_RH = torch.empty(rows, hidden, dtype=dtype, device=code_RH.device)
    # A block of rows lies in one slab or in two; each row looks up its own.
    dequantise_kernel[(triton.cdiv(rows, 8), triton.cdiv(hidden, 512))](
        code_RH, scale_RG, received_W, out_RH, rows, rows // received_W.shape[0], H=hidden, BR=8, BH=512, num_warps=4
    )
    return out_RH
