"""The CUDA side of `carpool.replicas.slot_plan`: one launch for a plan, three for which replica serves which choice,
and one to count them.

`plan` is one program. All ranks' choices (W, E) are read once; what changes from step to step stays in registers: each
expert's choices that are left at home, and loads, own choices, fetched and sent experts of each rank. A step of the
greedy search is three reductions that follow each other:

    source     over ranks, of the state that the step before left, together with that state's cost
    target     over ranks; the key holds the slot that the target fills next, too
    expert     over experts; its choices travel through the reduction beside its key

A key is a number that grows with what is sought, with the index in its low bits, so that the lowest index wins a tie.
The loop ends when no rank is above the mean or nothing moves: plans of 8 ranks take 5 to 28 steps. Ranks' numbers are
in lanes (up to 32 ranks, of one warp), so only the reduction over experts has barriers, and none if the program is one
warp, as it is up to 1,024 numbers in (W, E). For 512 experts on 8 ranks a step is 318 instructions of each of 4 warps
on sm_90, with 3 barriers; one warp would issue 568, and 872 with all ranks' numbers in each lane.

`serve` is a counting sort that stops before anything is moved (`carpool.experts.sort_kernel` has the same kernels):

    count      keys (2 * expert, + 1 if the token has no other expert on the rank of the expert's home), and how many of
               each in each block of tokens
    share      one program per expert: where each block's choices begin among those of the expert, and, from the plan,
               where the choices end that home and replicas serve
    place      each block sorts its keys; a choice's place among those of its expert says who serves it

All integers, so equal to PyTorch's bit for bit. Choices are int32, costs int64 (`Costs` is bounded so that they fit).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carpool.kernels.quick import cdiv, power_of_2, quick
from carpool.replicas.slot_costs import WORK, Costs

# Numbers in (W, E) for a warp, and the largest such table: 128 registers of each thread of 8 warps.
OF_A_WARP, MOST_WARPS = 1024, 8
LARGEST_TABLE = 32768
LARGEST_BINS = 4096
LARGEST_K = 64

# Choices of a block, and blocks that are added up at a time.
BLOCK = 1024
CHUNK = 256


def fits(shape: torch.Size, spare: int, top_k: int = 1) -> bool:
    """Whether the kernels can do it with `load_WE` of this shape: 512 experts on 64 ranks, for example."""
    num_ranks, num_experts = shape
    table = power_of_2(num_ranks) * power_of_2(num_experts)
    bins = max(2 * num_experts + 1, num_ranks * spare)
    return table <= LARGEST_TABLE and bins <= LARGEST_BINS and 0 < top_k <= LARGEST_K


@triton.jit
def _largest(a, b, c, other_a, other_b, other_c):  # type: ignore[no-untyped-def]
    return tl.maximum(a, other_a), tl.maximum(b, other_b), tl.maximum(c, other_c)


@triton.jit
def _of_larger_key(key, value, other_key, other_value):  # type: ignore[no-untyped-def]
    return tl.maximum(key, other_key), tl.where(key > other_key, value, other_value)


@triton.jit
def _state(  # type: ignore[no-untyped-def]
    load_W, own_W, moves_W, mean_W, limit_W, rank, trip, fetch, W: tl.constexpr, WP: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """(choices above the limit, cost, key of the next source) of the ranks' state."""
    over_W = tl.where(rank < W, tl.maximum(load_W - limit_W, 0), 0)
    cost_W = load_W.to(tl.int64) * WORK + (load_W - own_W).to(tl.int64) * trip + moves_W.to(tl.int64) * fetch
    above_W = tl.where(rank < W, tl.maximum(load_W - mean_W, 0), 0)
    key_W = above_W.to(tl.int64) * WP + (WP - 1 - rank)
    return tl.reduce((over_W, cost_W, key_W), 0, _largest)


@quick
@triton.jit(do_not_specialize=["trip", "fetch", "limit"])
def _plan(  # type: ignore[no-untyped-def]
    load, home, node, filled, load_out, E, trip, fetch, limit, NODES: tl.constexpr, LIMITED: tl.constexpr,
    WORK: tl.constexpr, W: tl.constexpr, S: tl.constexpr, WP: tl.constexpr, EP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    # filled (3, W * S): expert, choices and step of each spare slot.
    slot, P = tl.arange(0, PP), W * S
    tl.store(filled + slot, -1, mask=slot < P)
    tl.store(filled + P + slot, 0, mask=slot < P)
    tl.store(filled + 2 * P + slot, 0, mask=slot < P)
    rank, e = tl.arange(0, WP), tl.arange(0, EP)
    inside = (rank < W)[:, None] & (e < E)[None, :]
    load_WE = tl.load(load + rank[:, None] * E + e[None, :], mask=inside, other=0).to(tl.int32)
    home_E = tl.load(home + e, mask=e < E, other=-1).to(tl.int32)
    quota_E = tl.sum(load_WE, 0)
    lives = home_E[None, :] == rank[:, None]
    # Through memory, so that from now on each rank's numbers are in one lane, not all ranks' in all of them.
    tl.store(load_out + rank, tl.sum(tl.where(lives, quota_E[None, :], 0), 1), mask=rank < W)
    tl.store(load_out + W + rank, tl.sum(tl.where(lives, load_WE, 0), 1), mask=rank < W)
    tl.debug_barrier()
    load_W = tl.load(load_out + rank, mask=rank < W, other=0).to(tl.int32)
    own_W = tl.load(load_out + W + rank, mask=rank < W, other=0).to(tl.int32)
    if NODES:
        node_W = tl.load(node + rank, mask=rank < W, other=0)
        same = (node_W[:, None] == node_W[None, :]) & (rank < W)[:, None]
        members_W = tl.maximum(tl.sum(same.to(tl.int32), 0), 1)
        sum_W = tl.sum(tl.where(same, load_W[:, None], 0), 0)
    else:
        members_W = tl.full([WP], W, tl.int32)
        sum_W = tl.full([WP], 0, tl.int32) + tl.sum(load_W, 0)
    mean_W = ((sum_W.to(tl.int64) + members_W - 1) // members_W).to(tl.int32)
    limit_W = sum_W
    if LIMITED:
        most_W = (sum_W.to(tl.int64) * limit) // (members_W.to(tl.int64) * 1000)
        # No rank's load is above the sum, so a higher limit says nothing more.
        limit_W = tl.minimum(tl.maximum(most_W, mean_W.to(tl.int64)), sum_W.to(tl.int64)).to(tl.int32)

    fetched_W, sent_W = tl.zeros([WP], tl.int32), tl.zeros([WP], tl.int32)
    over, cost, key = _state(load_W, own_W, sent_W, mean_W, limit_W, rank, trip, fetch, W, WP, WORK)
    best_over, best_cost, best_load_W = over, cost, load_W
    step = 0
    kept = 0
    tl.debug_barrier()
    while key >= WP:
        source, above = WP - 1 - (key % WP).to(tl.int32), key // WP
        # As room, and for the ranks after it: which rank, and which of its slots is next.
        open = (fetched_W < S) & (rank < W)
        if NODES:
            open = open & (node_W == tl.load(node + source))
        room_W = tl.where(open, tl.maximum(mean_W - load_W, 0), 0).to(tl.int64)
        to = tl.max((room_W * WP + (WP - 1 - rank)) * (2 * S) + fetched_W, 0)
        next_slot, to = (to % (2 * S)).to(tl.int32), to // (2 * S)
        target, want = WP - 1 - (to % WP).to(tl.int32), tl.minimum(above, to // WP).to(tl.int32)
        moved_E = tl.where(home_E == source, tl.minimum(quota_E, want), 0)
        near_E = tl.minimum(tl.load(load + target * E + e, mask=e < E, other=0).to(tl.int32), moved_E)
        key_E = (moved_E.to(tl.int64) * WORK + near_E.to(tl.int64) * trip) * EP + (EP - 1 - e)
        best, quota = tl.reduce((key_E, quota_E), 0, _of_larger_key)
        expert = EP - 1 - (best % EP).to(tl.int32)
        # If nothing moves, every number stays as it is, and this is the last step.
        moved = tl.where(best >= EP, tl.minimum(quota, want), 0)
        some = (moved > 0).to(tl.int32)
        near = tl.minimum(tl.load(load + target * E + expert, mask=moved > 0, other=0).to(tl.int32), moved)
        own = tl.load(load + source * E + expert, mask=moved > 0, other=0).to(tl.int32)
        stay = tl.minimum(own, quota) - tl.minimum(own, quota - moved)
        step += some
        place = filled + target * S + next_slot
        tl.store(place, expert, mask=moved > 0)
        tl.store(place + P, moved, mask=moved > 0)
        tl.store(place + 2 * P, step, mask=moved > 0)
        at_source, at_target = (rank == source).to(tl.int32), (rank == target).to(tl.int32)
        load_W += moved * (at_target - at_source)
        own_W += near * at_target - stay * at_source
        quota_E -= tl.where(e == expert, moved, 0)
        fetched_W += some * at_target
        sent_W += some * at_source
        moves_W = tl.maximum(fetched_W, sent_W)
        over, cost, key = _state(load_W, own_W, moves_W, mean_W, limit_W, rank, trip, fetch, W, WP, WORK)
        better = (over < best_over) | ((over == best_over) & (cost < best_cost))
        best_over, best_cost = tl.where(better, over, best_over), tl.where(better, cost, best_cost)
        best_load_W, kept = tl.where(better, load_W, best_load_W), tl.where(better, step, kept)
        key = tl.where(moved > 0, key, 0)
    tl.store(load_out + rank, best_load_W.to(tl.int64), mask=rank < W)
    tl.debug_barrier()
    left_out = tl.load(filled + 2 * P + slot, mask=slot < P, other=0) > kept
    tl.store(filled + slot, -1, mask=left_out)
    tl.store(filled + P + slot, 0, mask=left_out)


def plan(
    load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expert_WS, choices_WS, load_W) of `plan_slots`. Fewer than 2^31 choices, and `fits`."""
    (num_ranks, num_experts), device = load_WE.shape, load_WE.device
    padded_w, padded_e = power_of_2(num_ranks), power_of_2(num_experts)
    filled = torch.empty(3, num_ranks, spare, dtype=torch.int32, device=device)
    load_2W = torch.empty(2 * num_ranks, dtype=torch.int64, device=device)
    _plan[(1,)](
        load_WE.contiguous(), home_E, home_E if node_W is None else node_W, filled, load_2W, num_experts, costs.trip,
        costs.fetch, costs.limit, NODES=node_W is not None, LIMITED=costs.limit > 0, WORK=WORK, W=num_ranks, S=spare,
        WP=padded_w, EP=padded_e, PP=power_of_2(num_ranks * spare),
        num_warps=min(max(1, padded_w * padded_e // OF_A_WARP), MOST_WARPS),
    )  # fmt: skip
    return filled[0], filled[1], load_2W[:num_ranks]


@quick
@triton.jit(do_not_specialize=["limit", "me"])
def _add_counts(  # type: ignore[no-untyped-def]
    counts, load, home, expert, load_W, E, limit, me, W: tl.constexpr, P: tl.constexpr, WP: tl.constexpr,
    EP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    rank, e, slot = tl.arange(0, WP), tl.arange(0, EP), tl.arange(0, PP)
    inside = (rank < W)[:, None] & (e < E)[None, :]
    load_E = tl.sum(tl.load(load + rank[:, None] * E + e[None, :], mask=inside, other=0).to(tl.int32), 0)
    home_E = tl.load(home + e, mask=e < E, other=-1).to(tl.int32)
    total = tl.sum(load_E, 0).to(tl.int64)
    before = tl.max(tl.sum(tl.where(home_E[None, :] == rank[:, None], load_E[None, :], 0), 1), 0).to(tl.int64)
    fullest = tl.max(tl.load(load_W + rank, mask=rank < W, other=0).to(tl.int64), 0)
    replicas = tl.sum((tl.load(expert + slot, mask=slot < P, other=-1) >= 0).to(tl.int64), 0)
    most = tl.maximum(total * limit // (1000 * W), (total + W - 1) // W)
    beyond = ((limit > 0) & (fullest > most)).to(tl.int64)
    at = tl.arange(0, 8)
    added = tl.where(at == 0, 1, tl.where(at == 1, total, tl.where(at == 2, before, fullest)))
    added = tl.where(at == 4, replicas, tl.where(at == 5, beyond, added))
    added = tl.where(at == 6, tl.load(load_W + me).to(tl.int64), added)
    tl.store(counts + at, tl.load(counts + at, mask=at < 7, other=0) + added, mask=at < 7)


def add_counts(
    counts: torch.Tensor, load_WE: torch.Tensor, home_E: torch.Tensor, expert_WS: torch.Tensor, load_W: torch.Tensor,
    rank: int, limit: int,
) -> None:  # fmt: skip
    """`add_counts` of slot_plan.py. `fits`."""
    (num_ranks, num_experts), slots = load_WE.shape, expert_WS.numel()
    padded_w, padded_e = power_of_2(num_ranks), power_of_2(num_experts)
    _add_counts[(1,)](
        counts, load_WE.contiguous(), home_E, expert_WS.contiguous(), load_W.contiguous(), num_experts, limit, rank,
        W=num_ranks, P=slots, WP=padded_w, EP=padded_e, PP=power_of_2(slots),
        num_warps=min(max(1, padded_w * padded_e // OF_A_WARP), MOST_WARPS),
    )  # fmt: skip


@quick
@triton.jit
def _count(  # type: ignore[no-untyped-def]
    expert_in, home, keys, counts, starts, tokens, E, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row, k = block * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, KP)[None, :]
    inside = (row < tokens) & (k < K)
    expert = tl.load(expert_in + row * K + k, mask=inside, other=-1)
    home_TK = tl.load(home + expert, mask=expert >= 0, other=-1).to(tl.int32)
    same = tl.zeros([ROWS, KP], tl.int32)
    for other in tl.static_range(K):
        chosen = tl.load(expert_in + row * K + other, mask=row < tokens, other=-1)
        same += (tl.load(home + chosen, mask=chosen >= 0, other=-2).to(tl.int32) == home_TK).to(tl.int32)
    key = tl.where(expert < 0, 2 * E, 2 * expert + (same == 1).to(tl.int32)).to(tl.int32)
    tl.store(keys + row * K + k, key, mask=inside)
    count = tl.histogram(tl.reshape(key, [ROWS * KP]), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + block * BINS + bins, count)
    tl.store(starts + block * BINS + bins, tl.cumsum(count, 0) - count)


@quick
@triton.jit(do_not_specialize=["me"])
def _share(  # type: ignore[no-untyped-def]
    counts, starts, load, home, expert_in, choices_in, names, table, me, blocks, E, NAMED: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, WP: tl.constexpr, PP: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    begin = 0
    for alone in tl.static_range(2):
        for first in range(0, blocks, CHUNK):
            block = first + tl.arange(0, CHUNK)
            at, inside = block * BINS + 2 * expert + alone, block < blocks
            count = tl.load(counts + at, mask=inside, other=0)
            start = tl.load(starts + at, mask=inside, other=0)
            # From now on: what to add to a choice's place in its sorted block to get its place in those of its expert.
            tl.store(starts + at, begin + tl.cumsum(count, 0) - count - start, mask=inside)
            begin += tl.sum(count, 0)

    # As `_shares` of slot_plan.py, for the slots of one expert.
    rank, slot = tl.arange(0, WP), tl.arange(0, PP)
    load_W = tl.load(load + rank * E + expert, mask=rank < W, other=0).to(tl.int32)
    lives = tl.load(home + expert).to(tl.int32)
    mine = tl.load(expert_in + slot, mask=slot < W * S, other=-1) == expert
    holder = slot // S
    quota_P = tl.load(choices_in + slot, mask=mine, other=0)
    own_P = tl.minimum(tl.load(load + holder * E + expert, mask=mine, other=0).to(tl.int32), quota_P)
    mine_load = tl.sum(tl.where(rank == me, load_W, 0), 0)
    home_quota = tl.sum(load_W, 0) - tl.sum(quota_P, 0)
    home_own = tl.minimum(tl.sum(tl.where(rank == lives, load_W, 0), 0), home_quota)
    before = tl.sum(tl.where(rank < me, load_W, 0), 0) - tl.sum(tl.where(holder < me, own_P, 0), 0)
    before -= tl.where(lives < me, home_own, 0)
    rest = mine_load - tl.sum(tl.where(holder == me, own_P, 0), 0) - tl.where(lives == me, home_own, 0)
    open_P = quota_P - own_P
    from_P = home_quota - home_own + tl.cumsum(open_P, 0) - open_P
    share_P = tl.minimum(before + rest, from_P + open_P) - tl.maximum(before, from_P)
    share_P = tl.where(mine, tl.maximum(share_P, 0) + tl.where(holder == me, own_P, 0), 0)
    at_home = mine_load - tl.sum(share_P, 0)
    # table (2, E, W): where the choices end that the home, then each replica serves, and its slot.
    number = tl.cumsum(mine.to(tl.int32), 0)
    line = table + expert * W
    name_P, name_home = slot, -1
    if NAMED:
        name_P = tl.load(names + E + slot, mask=mine, other=0)
        name_home = tl.load(names + expert)
    tl.store(line, at_home)
    tl.store(line + number, at_home + tl.cumsum(share_P, 0), mask=mine)
    tl.store(line + E * W, name_home)
    tl.store(line + E * W + number, name_P, mask=mine)


@quick
@triton.jit
def _place(  # type: ignore[no-untyped-def]
    keys, shifts, table, entries, E, W: tl.constexpr, OF_A_BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, index = tl.program_id(0), tl.arange(0, BLOCK)
    entry = block * OF_A_BLOCK + index
    key = tl.load(keys + entry, mask=(index < OF_A_BLOCK) & (entry < entries), other=2 * E)
    both = tl.sort(key * BLOCK + index)
    key, entry = both // BLOCK, block * OF_A_BLOCK + both % BLOCK
    chosen = key < 2 * E
    place = tl.load(shifts + block * BINS + key, mask=chosen, other=0) + index
    line = table + key // 2 * W
    slot = tl.load(line + E * W, mask=chosen, other=-1)
    beyond = chosen & (place >= tl.load(line, mask=chosen, other=0))
    replica = 1
    while (replica < W) & (tl.max(beyond.to(tl.int32), 0) > 0):
        slot = tl.where(beyond, tl.load(line + E * W + replica, mask=beyond, other=-1), slot)
        beyond = beyond & (place >= tl.load(line + replica, mask=beyond, other=0))
        replica += 1
    tl.store(keys + entry, slot, mask=(both % BLOCK < OF_A_BLOCK) & (entry < entries))


def serve(
    expert_TK: torch.Tensor, load_WE: torch.Tensor, home_E: torch.Tensor, expert_WS: torch.Tensor,
    choices_WS: torch.Tensor, rank: int, names_N: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """slot_TK of `served_by`. Fewer than 2^31 choices, and `fits`."""
    (tokens, top_k), (num_ranks, num_experts), device = expert_TK.shape, load_WE.shape, expert_TK.device
    # First the keys are there, and each block then puts slots in place of its own.
    slot_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    if not tokens:
        return slot_TK
    padded_k, bins, spare = power_of_2(top_k), power_of_2(2 * num_experts + 1), expert_WS.shape[1]
    rows = BLOCK // padded_k
    blocks = cdiv(tokens, rows)
    counts, starts = torch.empty(2, blocks, bins, dtype=torch.int32, device=device)
    table = torch.empty(2, num_experts, num_ranks, dtype=torch.int32, device=device)
    _count[(blocks,)](
        expert_TK.contiguous(), home_E, slot_TK, counts, starts, tokens, num_experts, K=top_k, KP=padded_k, ROWS=rows,
        BINS=bins, num_warps=4,
    )  # fmt: skip
    _share[(num_experts,)](
        counts, starts, load_WE.contiguous(), home_E, expert_WS.contiguous(), choices_WS.contiguous(),
        home_E if names_N is None else names_N, table, rank, blocks, num_experts, NAMED=names_N is not None,
        W=num_ranks, S=spare, WP=power_of_2(num_ranks), PP=power_of_2(num_ranks * spare), BINS=bins,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _place[(blocks,)](
        slot_TK, starts, table, tokens * top_k, num_experts, W=num_ranks, OF_A_BLOCK=rows * top_k, BINS=bins,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return slot_TK
