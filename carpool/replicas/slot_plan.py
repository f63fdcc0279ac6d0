"""The plan of a micro-batch's spare slots: which experts are replicated where, and which replica serves which choice.

A rank has a few spare slots besides its homes. From the choices of every rank for every expert, which all ranks know,
each rank computes the same plan, so nothing is negotiated:

    load_WE   choices of each rank's tokens     2 ranks, 4 experts, homes [0 1 | 2 3], one spare slot each
              [[6 2 0 0]                        loads of ranks: 14 and 2, the mean is 8
               [6 0 1 1]]
    plan      replicate an expert of the rank with the largest load, as many choices as bring either to the mean
              expert 0 on rank 1, 6 choices     loads 8 and 8: rank 1's own tokens need no trip any more

The rule (a greedy search; LLEP, arXiv 2601.17111, section 3, spills in the same way, and UltraEP, arXiv 2606.04101,
plans each micro-batch) is repeated until no rank above the mean can give, or none below it can take:

    1. from    the rank that is farthest above the mean
    2. to      among ranks with an empty spare slot (of its node, if replicas stay inside), the one farthest below
    3. expert  the one whose choices relieve `from` most, counting the trips that end where they began, on `to`

Of all beginnings of this list the cheapest is kept. A plan costs what its dearest rank costs: expert computations,
choices that arrive from other ranks, and experts fetched or sent (the larger number: links are duplex). So nothing is
fetched that does not pay, and a plan is never dearer than none; but beginnings that exceed a limit of the load are
worse than all others, so that buffers have a known size.

All are integers, and the order is fixed: the kernel (`slot_plan_kernel.py`) gives the same plan, and so does every
rank. Ties go to the lowest number.

Which choices a replica serves follows from the plan, without another message. Each serves tokens of its own rank
first. Further tokens are dealt out in order of ranks: those of an expert stand in one line, first rank's first, and
each replica takes the next ones, the home first. Among the tokens of one rank those stay with the home that visit the
home's rank anyway, for the sake of another expert: they would need one ride more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from carpool.kernels.device import on_gpu
from carpool.replicas.slot_costs import WORK, Costs


class SlotPlan(NamedTuple):
    """Attributes:
    expert_WS: (W, S) int32, the expert in each spare slot of each rank, -1: none.
    choices_WS: (W, S) int32, the choices that it serves.
    load_W: (W,) int64, choices that each rank serves.
    """

    expert_WS: torch.Tensor
    choices_WS: torch.Tensor
    load_W: torch.Tensor


def plan_slots(
    load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor | None = None
) -> SlotPlan:
    """The plan; see the module's docstring. Without host synchronisation on a GPU.

    Args:
        load_WE: (W, E) choices of each rank's tokens for each expert, any integers.
        home_E: (E,) int64, the rank of each expert's home.
        spare: S, spare slots of a rank, at least 1.
        node_W: (W,) the node of each rank, where replicas stay on it, and the mean is that of a node.
            None: replicas may be anywhere.
    """
    if not torch.compiler.is_compiling() and on_gpu(load_WE):
        from carpool.replicas import slot_plan_kernel

        if slot_plan_kernel.fits(load_WE.shape, spare):
            return SlotPlan(*slot_plan_kernel.plan(load_WE, home_E, spare, costs, node_W))
    load_WE = load_WE.long()
    num_ranks, device = load_WE.shape[0], load_WE.device
    rank_W, none_W = torch.arange(num_ranks, device=device), torch.zeros(num_ranks, dtype=torch.int64, device=device)
    quota_E = load_WE.sum(0)
    load_W = none_W.scatter_add(0, home_E, quota_E)
    near_WW = (
        torch.ones(num_ranks, num_ranks, dtype=torch.bool, device=device)
        if node_W is None
        else node_W[:, None] == node_W
    )
    members_W, sum_W = near_WW.sum(1), (near_WW * load_W).sum(1)
    mean_W = (sum_W + members_W - 1) // members_W
    limit_W = torch.maximum(sum_W * costs.limit // (1000 * members_W), mean_W) if costs.limit else sum_W
    own_W = none_W.scatter_add(0, home_E, load_WE.gather(0, home_E.unsqueeze(0))[0])
    fetched_W, sent_W = none_W, none_W
    expert_WS = torch.full((num_ranks, spare), -1, dtype=torch.int64, device=device)
    choices_WS, step_WS = torch.zeros_like(expert_WS), torch.zeros_like(expert_WS)
    slot_S = torch.arange(spare, device=device)

    def cost() -> tuple[torch.Tensor, torch.Tensor]:
        per_W = load_W * WORK + (load_W - own_W) * costs.trip + torch.maximum(fetched_W, sent_W) * costs.fetch
        return (load_W - limit_W).max().clamp(min=0), per_W.max()

    (best_over, best_cost), best_load_W = cost(), load_W
    kept = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1, num_ranks * spare + 1):
        above_W = load_W - mean_W
        # Each of one element: a tensor without dimensions as an index would make the host wait.
        source = above_W.argmax(keepdim=True)
        room_W = torch.where(near_WW[source][0] & (fetched_W < spare), -above_W, 0)
        target = room_W.argmax(keepdim=True)
        want = torch.minimum(above_W[source], room_W[target]).clamp(min=0)
        moved_E = torch.where(home_E == source, torch.minimum(quota_E, want), 0)
        near_E = torch.minimum(load_WE[target][0], moved_E)
        expert = (moved_E * WORK + near_E * costs.trip).argmax(keepdim=True)
        moved, near = moved_E[expert], near_E[expert]
        # Nothing follows that could move anything. On a GPU the host would have to wait to know.
        if device.type == "cpu" and not moved:
            break
        some = (moved > 0).long()
        at_source, at_target = (rank_W == source).long(), (rank_W == target).long()
        own = load_WE[source, expert]
        stay = torch.minimum(own, quota_E[expert]) - torch.minimum(own, quota_E[expert] - moved)
        here_WS = ((at_target * some).bool()[:, None]) & (slot_S == fetched_W[:, None])
        expert_WS, choices_WS = torch.where(here_WS, expert, expert_WS), torch.where(here_WS, moved, choices_WS)
        step_WS = torch.where(here_WS, step, step_WS)
        load_W = load_W + moved * (at_target - at_source)
        own_W = own_W + near * at_target - stay * at_source
        quota_E = quota_E.index_add(0, expert, -moved)
        fetched_W, sent_W = fetched_W + some * at_target, sent_W + some * at_source
        over, dearest = cost()
        better = (over < best_over) | ((over == best_over) & (dearest < best_cost))
        best_over, best_cost = torch.where(better, over, best_over), torch.where(better, dearest, best_cost)
        best_load_W, kept = torch.where(better, load_W, best_load_W), torch.where(better, step, kept)
    left_out = step_WS > kept
    return SlotPlan(torch.where(left_out, -1, expert_WS).int(), torch.where(left_out, 0, choices_WS).int(), best_load_W)


def served_by(
    expert_TK: torch.Tensor,
    load_WE: torch.Tensor,
    home_E: torch.Tensor,
    plan: SlotPlan,
    rank: int,
    names_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, K) int32: the spare slot, counted over all ranks (rank * S + slot), that serves each choice of this rank's
    tokens; -1: the home does, or there is no expert. See the module's docstring.

    Args:
        expert_TK: (T, K) int32, the choices of this rank's tokens, -1: none. A token chooses an expert at most once.
        load_WE, home_E: as for `plan_slots`.
        names_N: (E + W * S,) int32, other names: of each expert's slot at home, then of each spare slot, as a transport
            counts them. The result has these, and -1 only where there is no expert.
    """
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.replicas import slot_plan_kernel

        if slot_plan_kernel.fits(load_WE.shape, plan.expert_WS.shape[1], expert_TK.shape[1]):
            return slot_plan_kernel.serve(expert_TK, load_WE, home_E, plan.expert_WS, plan.choices_WS, rank, names_N)
    load_WE = load_WE.long()
    first_P, end_P = _shares(load_WE, home_E, plan, rank)
    num_experts, expert_P = load_WE.shape[1], plan.expert_WS.flatten().long()
    order_TK = _order(expert_TK, load_WE[rank], home_E)
    index_TK = expert_TK.clamp(min=0).long()
    # Slots stand in the order in which they serve: by expert, then by the first choice. Empty ones come last.
    most = expert_TK.numel() + 1
    first_P = torch.where(expert_P < 0, num_experts * most, expert_P * most + first_P)
    first_P, slot_P = first_P.sort(stable=True)
    # The last slot that does not begin after the choice; it may serve another expert, or have ended before.
    found_TK = torch.searchsorted(first_P, index_TK * most + order_TK, right=True) - 1
    slot_TK = slot_P[found_TK.clamp(min=0)]
    copied_TK = (found_TK >= 0) & (expert_P[slot_TK] == expert_TK) & (order_TK < end_P[slot_TK])
    if names_N is None:
        return torch.where(copied_TK & (expert_TK >= 0), slot_TK, -1).int()
    return torch.where(expert_TK < 0, -1, names_N[torch.where(copied_TK, num_experts + slot_TK, index_TK)])


def count_choices(expert_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(E,) int32: how many of these choices (-1: none) name each expert. Without host synchronisation on a GPU."""
    load_N = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert_TK.device)
    if not torch.compiler.is_compiling() and on_gpu(expert_TK):
        from carpool.layout import assign_kernel

        assign_kernel.count_slots(expert_TK, load_N)
    else:
        index_N = torch.where(expert_TK < 0, num_experts, expert_TK).flatten().long()
        load_N.scatter_add_(0, index_N, torch.ones_like(index_N, dtype=torch.int32))
    return load_N[:num_experts]


def add_counts(
    counts: torch.Tensor, load_WE: torch.Tensor, home_E: torch.Tensor, plan: SlotPlan, rank: int, limit: int
) -> None:
    """Add a ride to counts (7,) int64: 1, its choices, the largest load of a rank without and with the plan, replicas,
    1 if the latter is beyond `limit` thousandths of the mean (0: there is none), and the load of this rank."""
    if not torch.compiler.is_compiling() and on_gpu(load_WE):
        from carpool.replicas import slot_plan_kernel

        if slot_plan_kernel.fits(load_WE.shape, plan.expert_WS.shape[1]):
            return slot_plan_kernel.add_counts(counts, load_WE, home_E, plan.expert_WS, plan.load_W, rank, limit)
    load_E, ranks = load_WE.sum(0), len(load_WE)
    before_W = torch.zeros_like(plan.load_W).scatter_add(0, home_E, load_E)
    replicas, total, fullest = (plan.expert_WS >= 0).sum(), load_E.sum(), plan.load_W.max()
    most = torch.maximum(total * limit // (1000 * ranks), (total + ranks - 1) // ranks)
    beyond = (fullest > most).long() if limit else torch.zeros_like(fullest)
    counts += torch.stack([torch.ones_like(total), total, before_W.max(), fullest, replicas, beyond, plan.load_W[rank]])
    return None


def _shares(
    load_WE: torch.Tensor, home_E: torch.Tensor, plan: SlotPlan, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each spare slot of all ranks, the first of this rank's choices of its expert that it serves, and the end."""
    num_ranks, spare = plan.expert_WS.shape
    device = load_WE.device
    expert_P, quota_P = plan.expert_WS.flatten().long(), plan.choices_WS.flatten().long()
    holder_P = torch.arange(num_ranks, device=device).repeat_interleave(spare)
    filled_P, index_P = expert_P >= 0, expert_P.clamp(min=0)
    # same_PP[p, q]: q stands before p in the line of its expert's replicas.
    number_P = torch.arange(len(expert_P), device=device)
    same_PP = ((expert_P[:, None] == expert_P) & (number_P[:, None] > number_P) & filled_P).long()

    own_P = torch.where(filled_P, torch.minimum(load_WE[holder_P, index_P], quota_P), 0)
    home_quota_E = load_WE.sum(0).index_add(0, index_P, -quota_P)
    home_own_E = torch.minimum(load_WE.gather(0, home_E.unsqueeze(0))[0], home_quota_E)
    rest_WE = load_WE.scatter_add(0, home_E.unsqueeze(0), -home_own_E.unsqueeze(0))
    rest_WE = rest_WE.index_put((holder_P, index_P), -own_P, accumulate=True)
    # This rank's place in the line, and those of the replicas, of which the home is the first.
    start_P = rest_WE[:rank].sum(0)[index_P]
    end_P = start_P + rest_WE[rank][index_P]
    open_P = quota_P - own_P
    from_P = (home_quota_E - home_own_E)[index_P] + (same_PP * open_P).sum(1)
    share_P = (torch.minimum(end_P, from_P + open_P) - torch.maximum(start_P, from_P)).clamp(min=0)
    share_P = torch.where(filled_P, share_P, 0) + torch.where(holder_P == rank, own_P, 0)
    at_home_E = load_WE[rank].index_add(0, index_P, -share_P)
    first_P = at_home_E[index_P] + (same_PP * share_P).sum(1)
    return first_P, first_P + share_P


def _order(expert_TK: torch.Tensor, load_E: torch.Tensor, home_E: torch.Tensor) -> torch.Tensor:
    """(T, K) int64: the place of each choice among those of its expert. Tokens that choose another expert of the same
    rank come first, each group in order of tokens."""
    index_TK = expert_TK.clamp(min=0).long()
    home_TK = torch.where(expert_TK < 0, -1, home_E[index_TK])
    alone_TK = (home_TK.unsqueeze(2) == home_TK.unsqueeze(1)).sum(2) == 1
    key_N = torch.where(expert_TK < 0, 2 * len(load_E), 2 * index_TK + alone_TK).flatten()
    sorted_N = key_N.argsort(stable=True)
    first_E = load_E.cumsum(0) - load_E
    place_N = torch.empty_like(sorted_N).scatter_(0, sorted_N, torch.arange(len(sorted_N), device=sorted_N.device))
    return place_N.view_as(expert_TK) - first_E[index_TK]
