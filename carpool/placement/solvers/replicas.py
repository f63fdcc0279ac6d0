"""Replicas for extra slots: added greedily by an estimate of what they save, and checked by the exact objective.

A replica of expert e on rank w saves a send of a token that has e alone on another rank a, if
    - the token visits w anyway for another expert, and its source is not a, or
    - w is the token's own rank.
Sources are taken as uniformly random, because a trace is too short to predict the data of each rank. A replica also
moves load from a to w, where each pair above the limit costs several sends, as in `search.py`. And it has a cost in
every step: its parameters are sent to it, and its gradients back (`_upkeep`, in sends).

    1. estimate the saving of every (expert, rank) from the current assignment,
    2. add the best for each rank that has a free slot, each expert at most once per round,
    3. update the assignment with `assign`, and repeat until slots are full or no replica saves anything;
    4. a few times: drop the replicas that save least, fill again, and accept if the exact objective fell.
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.objective import served_by
from carpool.placement.solvers.problem import OVERLOAD, Problem, held, homes_of
from carpool.placement.trace import Array
from carpool.planner.machine.cost import RIDES

EXCHANGES = 2
DROPPED = 0.25  # share of the replicas that step 4 drops


def with_replicas(problem: Problem, layout: ExpertLayout, allowed_load: Array) -> ExpertLayout:
    """`layout` with replicas in the extra slots of each rank, where they help."""
    if problem.extra_slots == 0:
        return layout
    best = _fill(problem, layout, allowed_load)
    best_cost = _cost(problem, best, allowed_load)
    for _ in range(EXCHANGES):
        fewer = _drop_least(problem, best, allowed_load)
        candidate = _fill(problem, fewer, allowed_load, best)
        cost = _cost(problem, candidate, allowed_load)
        if cost >= best_cost:
            break
        best, best_cost = candidate, cost
    return best


def _fill(
    problem: Problem, layout: ExpertLayout, allowed: Array, not_again: ExpertLayout | None = None
) -> ExpertLayout:
    """Steps 1 to 3. Replicas of `not_again` that `layout` lacks are not added in the first round."""
    full_W = np.array([len(home) for home in layout.homes]) + problem.extra_slots
    banned_EW = held(not_again) & ~held(layout) if not_again is not None else None
    for _ in range(problem.extra_slots * problem.num_ranks):
        held_EW = held(layout)
        free_W = full_W - held_EW.sum(0)
        value_EW = _value(problem, layout, allowed)
        value_EW[held_EW | (free_W <= 0)] = 0
        if banned_EW is not None:
            value_EW[banned_EW] = 0
            banned_EW = None
        added: list[tuple[int, int]] = []
        while value_EW.max() > 1e-6:
            expert, rank = np.unravel_index(int(value_EW.argmax()), value_EW.shape)
            added.append((int(expert), int(rank)))
            value_EW[expert], value_EW[:, rank] = 0, 0
        if not added:
            break
        layout = layout.with_replicas(added)
    return layout


def _value(problem: Problem, layout: ExpertLayout, allowed: Array) -> Array:
    """(E, W) estimate of the sends that a further replica saves, and of the overload that it removes."""
    trace, ranks = problem.trace, problem.num_ranks
    rank_TK = served_by(trace, layout)
    value_EW, moved_EW = _saved(problem, rank_TK, np.arange(ranks))
    value_EW *= problem.rank_weight
    if problem.node_weight:
        value_EW += problem.node_weight * _saved(problem, rank_TK, problem.node_W)[0]
    load_W = np.bincount(rank_TK.ravel(), minlength=ranks).astype(np.float64)
    # Load moves from the ranks that serve the expert now, in proportion.
    flat = trace.expert_TK.astype(np.int64) * ranks + rank_TK
    served_EW = np.bincount(flat.ravel(), minlength=problem.num_experts * ranks).reshape(-1, ranks)
    share_EW = served_EW / np.maximum(served_EW.sum(1, keepdims=True), 1)
    over_W = np.maximum(load_W - allowed, 0)
    upkeep_EW = _upkeep(problem, homes_of(layout))
    less_EWW = np.maximum(load_W - moved_EW[:, :, None] * share_EW[:, None, :] - allowed, 0) - over_W
    more_EW = np.maximum(load_W + moved_EW - allowed, 0) - over_W
    return value_EW - upkeep_EW - OVERLOAD * (problem.rank_weight + problem.node_weight) * (less_EWW.sum(2) + more_EW)


def _upkeep(problem: Problem, home_E: Array) -> Array:
    """(E, W) bytes of a replica in a step (parameters in one direction, gradients in the other), in units of the four
    sends of a hidden state, scaled to the trace."""
    cost, trace = problem.cost, problem.trace
    rows = (1 - cost.replicas_hidden) * 2 * cost.expert_bytes / (RIDES * cost.row_bytes)
    rows *= trace.num_tokens / (cost.tokens_per_rank * problem.num_ranks)
    return rows * np.where(problem.node_W[home_E][:, None] == problem.node_W, 1.0, problem.network_weight)


def _saved(problem: Problem, rank_TK: Array, group_W: Array) -> tuple[Array, Array]:
    """(E, W) sends between groups saved by a replica of e on w, and pairs that it would serve. group_W: of each
    rank."""
    expert_TK, experts = problem.trace.expert_TK.astype(np.int64), problem.num_experts
    groups, group_TK = int(group_W.max()) + 1, group_W[rank_TK]
    tokens = np.arange(len(rank_TK))[:, None]
    count_TG = np.bincount((tokens * groups + group_TK).ravel(), minlength=len(rank_TK) * groups).reshape(-1, groups)
    alone_TK = np.take_along_axis(count_TG, group_TK, axis=1) == 1
    visits_TG = (count_TG > 0).astype(np.float32)
    alone_EG, others_EG = (_sum_over(expert_TK, mask, visits_TG, experts) for mask in (alone_TK, ~alone_TK))
    number_E1 = np.bincount(expert_TK[alone_TK], minlength=experts)[:, None]
    total_E1 = np.bincount(expert_TK.ravel(), minlength=experts)[:, None]
    saved_EG = alone_EG * (1 - 1 / groups) + (number_E1 - alone_EG) / groups
    moved_EG = alone_EG + others_EG / 2 + (total_E1 - alone_EG - others_EG) / groups
    return saved_EG[:, group_W], moved_EG[:, group_W]


def _sum_over(expert_TK: Array, mask_TK: Array, what_TG: Array, experts: int) -> Array:
    """(E, G) sum of what_TG over the masked (token, choice) pairs of each expert."""
    chosen_TE = np.zeros((len(expert_TK), experts), dtype=np.float32)
    row, column = np.nonzero(mask_TK)
    chosen_TE[row, expert_TK[row, column]] = 1
    return (chosen_TE.T @ what_TG).astype(np.float64)


def _drop_least(problem: Problem, layout: ExpertLayout, allowed: Array) -> ExpertLayout:
    """The layout without the replicas that save the fewest sends to the home's rank."""
    rank_TK = served_by(problem.trace, layout)
    expert_TK = problem.trace.expert_TK.astype(np.int64)
    home_E = homes_of(layout)
    visits_TW = np.zeros((len(rank_TK), problem.num_ranks), dtype=bool)
    visits_TW[np.arange(len(rank_TK))[:, None], rank_TK] = True
    home_TK = home_E[expert_TK]
    needed_TK = (rank_TK != home_TK) & ~np.take_along_axis(visits_TW, home_TK, axis=1)
    flat = (expert_TK * problem.num_ranks + rank_TK)[needed_TK]
    use_EW = np.bincount(flat, minlength=problem.num_experts * problem.num_ranks).reshape(-1, problem.num_ranks)
    replicas = [(e, w) for e, w in np.argwhere(held(layout)).tolist() if home_E[e] != w]
    replicas.sort(key=lambda one: (int(use_EW[one[0], one[1]]), one))
    keep = replicas[max(1, round(DROPPED * len(replicas))) :]
    return ExpertLayout(layout.homes).with_replicas(keep)


def _cost(problem: Problem, layout: ExpertLayout, allowed: Array) -> float:
    """The objective of the search, with the trace's own sources."""
    rank_TK, source_T = served_by(problem.trace, layout), problem.trace.source_T(problem.num_ranks)
    held_EW, home_E = held(layout), homes_of(layout)
    held_EW[np.arange(len(home_E)), home_E] = False
    rows = problem.rank_weight * _remote(rank_TK, source_T, problem.num_ranks)
    rows += float(_upkeep(problem, home_E)[held_EW].sum())
    if problem.node_weight:
        node_W = problem.node_W
        rows += problem.node_weight * _remote(node_W[rank_TK], node_W[source_T], problem.num_nodes)
    load_W = np.bincount(rank_TK.ravel(), minlength=problem.num_ranks)
    return rows + OVERLOAD * (problem.rank_weight + problem.node_weight) * float(np.maximum(load_W - allowed, 0).sum())


def _remote(group_TK: Array, source_T: Array, groups: int) -> int:
    visits_TG = np.zeros((len(group_TK), groups), dtype=bool)
    visits_TG[np.arange(len(group_TK))[:, None], group_TK] = True
    visits_TG[np.arange(len(group_TK)), source_T] = False
    return int(visits_TG.sum())
