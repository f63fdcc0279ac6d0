"""Which slot serves each choice of each token: the one place where a copy of an expert is chosen.

`assign` is a pure, deterministic function. The layer, placement, planner and tests all call it: otherwise counted bytes
could not equal predicted ones.
"""

from __future__ import annotations

from typing import Protocol

import torch

from carpool.kernels.device import on_gpu
from carpool.layout.expert_layout import ExpertLayout


class RoutingLike(Protocol):
    """What `assign` reads of a `carpool.routing.Routing`."""

    @property
    def expert_TK(self) -> torch.Tensor: ...

    @property
    def serving_TW(self) -> torch.Tensor | None: ...


def assign(routing: RoutingLike, layout: ExpertLayout, source_rank: int) -> torch.Tensor:
    """The slot that serves each choice of each token, so that the token visits few ranks.

    An expert with one slot leaves no choice. With replicas, the fewest ranks that hold all experts of a token are a
    small set cover:
      1. The token's own rank serves what it can: no ride.
      2. Ranks of experts with a single slot are visited whatever we choose; they serve what else they hold.
      3. Of what is left, the rank that holds most is visited next, and so on while one holds at least two. Among
         ranks that hold equally many, the one whose experts have the fewest alternatives (the sum, over the ranks that
         hold an expert, of how many each of them holds), then the tokens take turns.
      4. What is then left shares no ride: copy number `token index mod copies`, which spreads the load.
    An expert that several visited ranks hold is served by one of them, in turn.

    Of sliced experts (`ExpertLayout.slices`) a token wants every slice of each choice, and "expert" above means slice.

    Greedy set cover is not always the optimum, but nearly: of 1000 random tokens each, top-8, with replicas of popular
    experts, it was the optimum for all on 4, 8 and 16 ranks (64 experts, up to 64 replicas) and for 999 on 32 ranks
    (256 experts, 256 replicas); `tests/placement/test_assign.py` compares with brute force. It is a fixed number of
    dense operations on (T, K, W) without host synchronisation, K / 2 rounds at most; none of it without replicas. On
    CUDA one kernel does the same (carpool/layout/assign_kernel.py), except where `torch.compile` fuses them.

    Args:
        routing: `expert_TK`, logical ids, -1 for no expert; and `serving_TW`, the ranks that may serve each token, if
            its routing is limited to some (carpool/routing/limit.py). An expert that has no copy there is served by
            any.
        layout: where the experts are.
        source_rank: the rank, in the expert-parallel group, that holds the tokens.

    Returns:
        slot_TK: (T, K) int32 global slot ids (rank * S + slot), -1 where there is no expert. Of sliced experts
            (T, K * slices): those of all slices of the first choice, then of the second, and so on.

    Example, layout of `carpool.layout.expert_layout`, tokens on rank 0:
        expert_TK = [[1, 2], [3, -1]]  ->  slot_TK = [[1, 3], [4, -1]]      expert 1 is served at home
        and on rank 1: expert_TK = [[1, 2]]  ->  [[5, 3]]                   by the replica there
    """
    expert_TK, serving_TW = routing.expert_TK, routing.serving_TW
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.layout import assign_kernel

        if assign_kernel.fits(expert_TK.shape[1] * layout.slices, layout.num_ranks):
            return assign_kernel.assign(expert_TK, layout, source_rank, serving_TW)
    expert_TK = slices_of(expert_TK, layout.slices)
    index_TK = expert_TK.clamp(min=0).long()
    copies_EC = layout.copies_EC(expert_TK.device)
    if copies_EC.shape[1] == 1:
        slot_TK = copies_EC[:, 0][index_TK]
        return torch.where(expert_TK < 0, -1, slot_TK)

    slot_TKW = layout.slot_EW(expert_TK.device)[index_TK]
    held_TKW = (slot_TKW >= 0) & (expert_TK >= 0).unsqueeze(-1)
    if serving_TW is not None:
        within_TKW = held_TKW & serving_TW.unsqueeze(1)
        held_TKW = torch.where(within_TKW.any(-1, keepdim=True), within_TKW, held_TKW)
    number_TK1 = held_TKW.sum(-1, keepdim=True, dtype=torch.int32)
    rank_W = torch.arange(layout.num_ranks, device=expert_TK.device, dtype=torch.int32)
    token_T1 = torch.arange(expert_TK.shape[0], device=expert_TK.device, dtype=torch.int32).unsqueeze(1)

    own_W = rank_W == source_rank
    visits_TW = (held_TKW & (number_TK1 == 1)).any(dim=1) | own_W
    visits_TW = _share_rides(held_TKW, visits_TW, rank_W, token_T1, layout.shared_rounds(expert_TK.shape[1]))

    # Lower is better: own rank, then a visited one, then the token's turn.
    most = layout.num_ranks
    turn_TKW = (held_TKW.cumsum(-1, dtype=torch.int32) - 1 - token_T1.unsqueeze(1)) % number_TK1.clamp(min=1)
    cost_TKW = turn_TKW + torch.where(own_W, 0, torch.where(visits_TW, most, 2 * most)).unsqueeze(1)
    best_TK1 = torch.where(held_TKW, cost_TKW, 3 * most).argmin(dim=-1, keepdim=True)
    slot_TK = slot_TKW.gather(2, best_TK1).squeeze(-1)
    return torch.where(expert_TK < 0, -1, slot_TK)


def slices_of(expert_TK: torch.Tensor, slices: int) -> torch.Tensor:
    """(T, K * slices): the number of each slice of the experts, -1 where there is none.

    Example, 2 slices: [[3, -1]]  ->  [[6, 7, -1, -1]]"""
    if slices == 1:
        return expert_TK
    expert_TK1 = expert_TK.unsqueeze(2)
    slice_C = torch.arange(slices, device=expert_TK.device, dtype=expert_TK.dtype)
    return torch.where(expert_TK1 < 0, -1, expert_TK1 * slices + slice_C).flatten(1)


def _share_rides(
    held_TKW: torch.Tensor, visits_TW: torch.Tensor, rank_W: torch.Tensor, token_T1: torch.Tensor, rounds: int
) -> torch.Tensor:
    """Step 3 of `assign`: the ranks visited, with those that serve two or more experts which no visited rank holds."""
    top_k, num_ranks = held_TKW.shape[1:]
    tie = 1 << (num_ranks - 1).bit_length()  # above any turn
    step = top_k * top_k * num_ranks + 1  # above any sum of alternatives
    # Every rank has another number for each token, and of any two ranks each is first for half of the tokens.
    turn_TW = (rank_W ^ token_T1) & (tie - 1)
    open_TK1 = ~(held_TKW & visits_TW.unsqueeze(1)).any(dim=-1, keepdim=True)
    for _ in range(rounds):
        wanted_TKW = held_TKW & open_TK1
        count_TW = wanted_TKW.sum(1)
        alternatives_TK1 = (wanted_TKW * count_TW.unsqueeze(1)).sum(-1, keepdim=True)
        score_TW = count_TW * step - (wanted_TKW * alternatives_TK1).sum(1)
        best_T1 = (score_TW * tie - turn_TW).argmax(dim=1, keepdim=True)
        next_TW = (rank_W == best_T1) & (count_TW > 1)
        visits_TW = visits_TW | next_TW
        open_TK1 = open_TK1 & ~(held_TKW & next_TW.unsqueeze(1)).any(dim=-1, keepdim=True)
    return visits_TW
