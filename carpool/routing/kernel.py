"""The CUDA side of `carpool.routing`: everything between the router's product and the `Routing`, in one pass.

    forward     logits (T, E)  ->  expert_TK, weight_TK, and per program: counts, sums of probabilities, sum of z
                reduce         ->  counts of the batch, `total` (summed over ranks by Python)
                losses         ->  the balance loss, and its slope with regard to each sum
    backward    logits, expert_TK, dweight_TK, slopes  ->  dlogits (T, E)

Plain PyTorch reads and writes (T, E) about 15 times and keeps probabilities for the backward; here logits are read
once each way, dlogits are written once, and logits and ids are all that is kept.

A program is one warp, and a tile is ROWS whole rows, so that a reduction over experts stays inside the warp. The K
best are found by K times "largest, then lowest index that has it, then remove it", on integers that are ordered as
the floats are (below), where a maximum over a warp is one instruction. What was removed in the end is what was chosen:
its column sums are the counts. Sums stay in registers over all tiles of a program, which takes tiles

    tile = program, program + programs, ...        programs: a fixed number, whatever the GPU

and a second kernel adds what the programs found, in order. No atomics: the same bits each time.

    logits  [0.3, 0.9, 0.9, nan]   K = 2     keys  [.., .., .., largest]  ->  3, then 1 (the lower of two equal ones)

Tiles of 512 logits take up to 128 registers (E 64 to 512; more beyond), so 16 programs fit on a multiprocessor, and
2048 fill the GPU once. With several warps to a program, rows of 256 experts or more would be split between warps, and
each of the K steps would go through shared memory.

With groups of experts a row is laid out as (groups, experts of a group), each padded to a power of two, so that the
best two of each group are reductions along an axis; columns still rise with expert ids, which keeps the tie rule.

Precision: float32 throughout. `exp` and division are the GPU's fast ones, a few units in the last place, so a
probability may differ from PyTorch's in the last digits. Without bias and groups logits themselves are compared,
and choices equal the plain version's exactly. In the backward a normalised weight's slope is
(scale / sum) (dw_k - sum over j of dw_j p_j / sum), so nothing is divided by a probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from carpool.kernels.quick import cdiv, power_of_2, quick
from carpool.routing.routing import Routed, Rule, sum_over

PROGRAMS = 2048

# Keys (see `_key`): of what is absent, below all numbers; and of minus infinity.
ABSENT = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-2139095041)


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """An int32 that is ordered as float32 x is: NaN above all (as `torch.sort` has it), -0.0 equal to 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit
def _float(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first(key, index, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS,): the lowest index that has the row's largest key."""
    best = tl.max(key, 1)
    return tl.min(tl.where(key == best[:, None], index[None, :], SIZE), 1)


@triton.jit
def _close_groups(  # type: ignore[no-untyped-def]
    key, GROUPS: tl.constexpr, SIZE: tl.constexpr, OPEN: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """Keys of experts outside the OPEN best groups become that of -inf. A group's score: its two best, added."""
    key = tl.reshape(key, (ROWS, GP, SP))
    best = tl.max(key, 2)
    score = _float(best)
    if SIZE > 1:
        is_best = key == best[:, :, None]
        second = tl.max(tl.where(is_best, ABSENT, key), 2)
        score += _float(tl.where(tl.sum(is_best.to(tl.int32), 2) > 1, best, second))
    group = tl.arange(0, GP)
    score = tl.where((group < GROUPS)[None, :], _key(score), ABSENT)
    closed = tl.full((ROWS, GP), 1, tl.int32)
    for _ in range(OPEN):
        hit = group[None, :] == _first(score, group, GP)[:, None]
        score = tl.where(hit, ABSENT, score)
        closed = tl.where(hit, 0, closed)
    key = tl.where((closed[:, :, None] != 0) & (key != ABSENT), LOWEST, key)
    return tl.reshape(key, (ROWS, GP * SP))


@triton.jit
def _softmax(x):  # type: ignore[no-untyped-def]
    """Softmax of each row, its maximum, its sum of powers, and logsumexp."""
    top = tl.max(x, 1)
    power = tl.exp(x - top[:, None])
    total = tl.sum(power, 1)
    return power / total[:, None], top, total, top + tl.log(total)


@triton.jit
def _chosen_scores(logits, row, expert, live, top, total, E: tl.constexpr, SOFTMAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, KP): the probabilities of the chosen, zero where there is none; where there is one; their sum."""
    there = live[:, None] & (expert >= 0) & (expert < E)
    x = tl.load(logits + row[:, None] * E + expert, mask=there, other=0.0)
    if SOFTMAX:
        score = tl.exp(x - top[:, None]) / total[:, None]
    else:
        score = tl.sigmoid(x)
    score = tl.where(there, score, 0.0)
    return score, there, tl.sum(score, 1)


@quick
@triton.jit(do_not_specialize=["tokens"])
def _forward(  # type: ignore[no-untyped-def]
    logits, bias, given, expert_out, weight_out, counts, sums, tokens, scale, E: tl.constexpr, K: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    REPLAY: tl.constexpr, LOSS: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    EP: tl.constexpr = GP * SP
    SIZE: tl.constexpr = E // GROUPS
    column, k_column = tl.arange(0, EP), tl.arange(0, KP)
    expert, valid = column, column < E
    if GROUPS > 1:
        expert = (column // SP) * SIZE + column % SP
        valid = (column % SP < SIZE) & (column // SP < GROUPS)
    if HAS_BIAS:
        shift = tl.load(bias + expert, mask=valid, other=0.0)
    count = tl.zeros((EP,), tl.int32)
    prob_sum = tl.zeros((EP,), tl.float32)
    z_sum = tl.zeros((ROWS,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < tokens
        inside = live[:, None] & valid[None, :]
        x = tl.load(logits + row[:, None] * E + expert[None, :], mask=inside, other=-float("inf"))
        prob, top, total, logsumexp = _softmax(x)
        if not SOFTMAX:
            prob = tl.sigmoid(x)
        at = row[:, None] * K + k_column[None, :]
        wanted = live[:, None] & (k_column < K)[None, :]
        if REPLAY:
            chosen = tl.load(given + at, mask=wanted, other=-1).to(tl.int32)
            hits = tl.zeros((ROWS, EP), tl.int32)
            for k in range(K):
                own = tl.load(given + row * K + k, mask=live, other=-1).to(tl.int32)
                hits += (own[:, None] == expert[None, :]).to(tl.int32)
        else:
            choice = x
            if HAS_BIAS or GROUPS > 1:
                choice = prob
            if HAS_BIAS:
                choice += shift[None, :]
            key = tl.where(valid[None, :], _key(choice), ABSENT)
            if GROUPS > 1:
                key = _close_groups(key, GROUPS, SIZE, OPEN, ROWS, GP, SP)
            chosen = tl.full((ROWS, KP), -1, tl.int32)
            for k in range(K):
                place = _first(key, column, EP)
                key = tl.where(column[None, :] == place[:, None], ABSENT, key)
                chosen = tl.where(k_column[None, :] == k, place[:, None], chosen)
            hits = (key == ABSENT).to(tl.int32)
            if GROUPS > 1:
                chosen = tl.where(chosen < 0, -1, (chosen // SP) * SIZE + chosen % SP)
            tl.store(expert_out + at, chosen, mask=wanted)
        score, _, score_sum = _chosen_scores(logits, row, chosen, live, top, total, E, SOFTMAX)
        if NORMALIZE:
            score = score / tl.where(score_sum < 1e-20, 1e-20, score_sum)[:, None]
        tl.store(weight_out + at, score * scale, mask=wanted)
        count += tl.sum(tl.where(inside, hits, 0), 0)
        if LOSS:
            if not SOFTMAX:
                prob = prob / tl.sum(prob, 1)[:, None]
            prob_sum += tl.sum(tl.where(inside, prob, 0.0), 0)
            z_sum += tl.where(live, logsumexp * logsumexp, 0.0)
    program = tl.program_id(0).to(tl.int64)
    tl.store(counts + program * E + expert, count, mask=valid)
    if LOSS:
        tl.store(sums + program * (E + 1) + expert, prob_sum, mask=valid)
        tl.store(sums + program * (E + 1) + E, tl.sum(z_sum, 0))


@quick
@triton.jit(do_not_specialize=["programs", "tokens"])
def _reduce(  # type: ignore[no-untyped-def]
    counts, sums, count_out, total, programs, tokens, E: tl.constexpr, LOSS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """total: counts (E), sums of probabilities (E), sum of z, tokens; all float32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < programs)[:, None]
        count += tl.load(counts + row[:, None] * E + column[None, :], mask=there & (column < E)[None, :], other=0)
        if LOSS:
            at = row[:, None] * (E + 1) + column[None, :]
            value += tl.load(sums + at, mask=there & (column <= E)[None, :], other=0.0)
    count_E = tl.sum(count, 0)
    tl.store(count_out + column, count_E.to(tl.int64), mask=column < E)
    if LOSS:
        tl.store(total + column, count_E.to(tl.float32), mask=column < E)
        tl.store(total + E + column, tl.sum(value, 0), mask=column <= E)
        if tl.program_id(0) == 0:
            tl.store(total + 2 * E + 1, tokens.to(tl.float32))


@quick
@triton.jit
def _losses(total, loss, slopes, aux, z, ranks, E: tl.constexpr, EP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The balance loss of the batch, and its slope with regard to this rank's sums; see `carpool.routing.router`."""
    column = tl.arange(0, EP)
    count = tl.load(total + column, mask=column < E, other=0.0)
    prob = tl.load(total + E + column, mask=column < E, other=0.0)
    z_all, tokens = tl.load(total + 2 * E), tl.load(total + 2 * E + 1)
    share = count / tl.maximum(tl.sum(count, 0), 1.0)
    tokens = tl.maximum(tokens, 1.0)
    tl.store(loss, (aux * E * tl.sum(share * prob, 0) + z * z_all) / tokens)
    tl.store(slopes + column, aux * E * share * ranks / tokens, mask=column < E)
    tl.store(slopes + E, z * ranks / tokens)


@quick
@triton.jit(do_not_specialize=["tokens"])
def _backward(  # type: ignore[no-untyped-def]
    logits, expert_in, dweight, dloss, slopes, dlogits, tokens, scale, E: tl.constexpr, K: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHTS: tl.constexpr, LOSS: tl.constexpr, ROWS: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    expert, k_column = tl.arange(0, EP), tl.arange(0, KP)
    valid = expert < E
    if LOSS:
        dvalue = tl.load(dloss)
        slope = tl.load(slopes + expert, mask=valid, other=0.0) * dvalue
        z_slope = tl.load(slopes + E) * dvalue
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < tokens
        inside = live[:, None] & valid[None, :]
        at = row[:, None] * E + expert[None, :]
        x = tl.load(logits + at, mask=inside, other=-float("inf"))
        soft, top, total, logsumexp = _softmax(x)
        prob = soft
        if not SOFTMAX:
            prob = tl.sigmoid(x)
        dprob = tl.zeros((ROWS, EP), tl.float32)
        if WEIGHTS:
            k_at = row[:, None] * K + k_column[None, :]
            k_mask = live[:, None] & (k_column < K)[None, :]
            chosen = tl.load(expert_in + k_at, mask=k_mask, other=-1).to(tl.int32)
            score, there, score_sum = _chosen_scores(logits, row, chosen, live, top, total, E, SOFTMAX)
            factor = tl.zeros((ROWS,), tl.float32) + scale
            mean = tl.zeros((ROWS,), tl.float32)
            if NORMALIZE:
                # The mean slope, weighted; where the sum is below its bound, the bound does not move with the scores.
                dw = tl.load(dweight + k_at, mask=there, other=0.0)
                floor = tl.where(score_sum < 1e-20, 1e-20, score_sum)
                mean = tl.where(score_sum < 1e-20, 0.0, tl.sum(dw * score, 1) / floor)
                factor = scale / floor
            for k in range(K):
                own = tl.load(expert_in + row * K + k, mask=live, other=-1).to(tl.int32)
                slope_k = (tl.load(dweight + row * K + k, mask=live, other=0.0) - mean) * factor
                dprob += tl.where(own[:, None] == expert[None, :], slope_k[:, None], 0.0)
        if LOSS:
            if SOFTMAX:
                dprob += slope[None, :]
            else:
                norm = tl.sum(prob, 1)
                dprob += (slope[None, :] - (tl.sum(prob * slope[None, :], 1) / norm)[:, None]) / norm[:, None]
        if SOFTMAX:
            dx = prob * (dprob - tl.sum(prob * dprob, 1)[:, None])
        else:
            dx = dprob * prob * (1.0 - prob)
        if LOSS:
            dx += soft * (2.0 * z_slope * logsumexp)[:, None]
        tl.store(dlogits + at, dx, mask=inside)


@torch._disable_dynamo  # as the ride: torch.compile compiles what is around it
def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor | None,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup],
) -> Routed:
    """`carpool.routing.router.route` for float32 logits, by kernels."""
    given_TK = expert_TK if expert_TK is None else expert_TK.contiguous()
    chosen_TK, weight_TK, aux_loss, count_E = _Route.apply(logits_TE.contiguous(), bias_E, given_TK, rule, groups)
    return Routed(chosen_TK if expert_TK is None else expert_TK, weight_TK, aux_loss, count_E)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        given_TK: torch.Tensor | None,
        rule: Rule,
        groups: Sequence[dist.ProcessGroup],
    ) -> tuple[torch.Tensor, ...]:
        tokens, num_experts = logits_TE.shape
        top_k = rule.top_k if given_TK is None else given_TK.shape[1]
        has_loss = bool(rule.aux_loss_coef or rule.z_loss_coef)
        num_groups = rule.num_groups or 1
        padded_groups = power_of_2(num_groups)
        padded_size = power_of_2(num_experts // num_groups)
        rows, grid = tiling(tokens, padded_groups * padded_size)
        chosen_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=logits_TE.device)
        weight_TK = torch.empty_like(chosen_TK, dtype=torch.float32)
        counts_PE = torch.empty(grid, num_experts, dtype=torch.int32, device=logits_TE.device)
        # One column more: z. Without losses nobody reads or writes them.
        sums_PE = logits_TE.new_empty((grid, num_experts + 1) if has_loss else (0,))
        if grid:
            _forward[(grid,)](
                logits_TE, logits_TE if bias_E is None else bias_E, chosen_TK if given_TK is None else given_TK,
                chosen_TK, weight_TK, counts_PE, sums_PE, tokens, rule.scaling_factor, E=num_experts, K=top_k,
                GROUPS=num_groups, OPEN=rule.topk_groups, SOFTMAX=rule.score == "softmax", NORMALIZE=rule.normalize,
                HAS_BIAS=bias_E is not None, REPLAY=given_TK is not None, LOSS=has_loss, ROWS=rows, GP=padded_groups,
                SP=padded_size, KP=padded(top_k), num_warps=1,
            )  # fmt: skip
        count_E = torch.empty(num_experts, dtype=torch.int64, device=logits_TE.device)
        total = logits_TE.new_empty(2 * num_experts + 2 if has_loss else 0)
        _reduce[(cdiv(num_experts + 1, 8),)](
            counts_PE, sums_PE, count_E, total, grid, tokens, E=num_experts, LOSS=has_loss, ROWS=256, COLUMNS=8,
            num_warps=4,
        )  # fmt: skip
        aux_loss = logits_TE.new_zeros(())
        slopes = logits_TE.new_empty(num_experts + 1 if has_loss else 0)
        if has_loss:
            ranks = sum_over(total, groups)
            _losses[(1,)](
                total, aux_loss, slopes, rule.aux_loss_coef, rule.z_loss_coef, ranks, E=num_experts,
                EP=padded(num_experts), num_warps=4,
            )  # fmt: skip
        ctx.rule = rule
        expert_TK = chosen_TK if given_TK is None else given_TK
        ctx.save_for_backward(logits_TE, expert_TK, slopes)
        ctx.mark_non_differentiable(chosen_TK, count_E, *(() if has_loss else (aux_loss,)))
        ctx.set_materialize_grads(False)
        return chosen_TK, weight_TK, aux_loss, count_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dweight_TK: torch.Tensor | None, daux: torch.Tensor | None, __: Any) -> Any:
        logits_TE, expert_TK, slopes = ctx.saved_tensors
        tokens, num_experts = logits_TE.shape
        dlogits_TE = torch.empty_like(logits_TE)
        rows, grid = tiling(tokens, padded(num_experts))
        if grid:
            _backward[(grid,)](
                logits_TE, expert_TK, logits_TE if dweight_TK is None else dweight_TK.contiguous(),
                logits_TE if daux is None else daux, slopes, dlogits_TE, tokens, ctx.rule.scaling_factor,
                E=num_experts, K=expert_TK.shape[1], SOFTMAX=ctx.rule.score == "softmax",
                NORMALIZE=ctx.rule.normalize, WEIGHTS=dweight_TK is not None, LOSS=daux is not None, ROWS=rows,
                EP=padded(num_experts), KP=padded(expert_TK.shape[1]), num_warps=1,
            )  # fmt: skip
        return dlogits_TE, None, None, None, None


def tiling(tokens: int, width: int) -> tuple[int, int]:
    """(rows of a tile, programs): tiles of about 512 logits, 16 for each thread of a warp."""
    rows = max(1, 512 // width)
    return rows, min(cdiv(tokens, rows), PROGRAMS)


def padded(size: int) -> int:
    return power_of_2(max(1, size))
