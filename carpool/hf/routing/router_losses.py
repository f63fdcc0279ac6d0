"""Losses that each MoE layer has for itself, beside the balance loss of the batch: z-loss, and balance in sequences.

    z          1/T sum_t (logsumexp_e logits_te)^2                   ST-MoE (arXiv 2202.08906, section 3.3)
    sequence   sum_e f_e P_e of a sequence's T tokens, f_e = E/(K T) sum_t [e in top-K of s_t], P_e = 1/T sum_t s'_te,
               the mean over sequences                               DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20)

s are a router's scores, and s' the same as shares: a softmax as it is, sigmoids over their sum. A sequence is one of
`data.sequence_length` tokens, whatever examples are in it. Context and sequence parallelism divide it over ranks, so
its choices are summed over those that have parts of it. P is linear, and each rank differentiates its own part, as in
`router_balance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RouterTokens:
    """The tokens of this rank that a router sees, in their order.

    Attributes:
        padding_T: true where there is no token but padding. None: there is none.
        sequence_ST: of which sequence of the micro-batch each is, for the loss of sequences.
        divided: groups of ranks, each of which has a part of every sequence."""

    padding_T: torch.Tensor | None = None
    sequence_ST: torch.Tensor | None = None
    divided: Sequence[dist.ProcessGroup] = ()


def layer_losses(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    tokens: RouterTokens,
    group: dist.ProcessGroup | None = None,
    *,
    z: bool = True,
    sequence: bool = True,
    sigmoid: bool = False,
) -> torch.Tensor:
    """The losses of each layer over all ranks of `group`. Collective.

    Args:
        router_logits: (T, E) of each layer;  top_k: K.
        group: all ranks that hold tokens of the batch; None: the whole world, if there is one.
        z, sequence: which of the two are computed.
        sigmoid: scores are sigmoids of logits, and not their softmax.

    Returns:
        (layers, how many losses) float32, the same values on every rank. The gradient is this rank's share times the
        number of ranks, as of `router_balance.balance_loss`."""
    logits_LTE = [logits_TE.float() for logits_TE in router_logits]
    one_T = logits_LTE[0].new_ones(logits_LTE[0].shape[0])
    if tokens.padding_T is not None:
        one_T = (~tokens.padding_T).float()
    # Of this rank, to be differentiated; with the values of all its sequences; over what they are a mean.
    own, whole, number = [], [], []
    if z:
        own.append(torch.stack([(one_T * logits_TE.logsumexp(-1) ** 2).sum() for logits_TE in logits_LTE]))
        whole.append(own[-1].detach())
        number.append(one_T.sum())
    if sequence:
        own_L, whole_L, rows = _in_sequences(logits_LTE, one_T, top_k, tokens, sigmoid)
        # Each sequence is counted by all ranks that have a part of it.
        own.append(own_L * math.prod(map(dist.get_world_size, tokens.divided)))
        whole.append(whole_L)
        number.append(rows)
    own_LN, all_LN = torch.stack(own, dim=1), torch.stack(whole, dim=1)
    # One row more: how many tokens, and sequences, there are.
    all_LN, ranks = torch.cat([all_LN, torch.stack(number).unsqueeze(0)]), 1
    if dist.is_initialized():
        dist.all_reduce(all_LN, group=group)
        ranks = dist.get_world_size(group)
    number_N = all_LN[-1].clamp(min=1.0)
    own_LN = own_LN * ranks / number_N
    return own_LN + (all_LN[:-1] / number_N - own_LN).detach()


def _in_sequences(
    logits_LTE: Sequence[torch.Tensor], one_T: torch.Tensor, top_k: int, tokens: RouterTokens, sigmoid: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over this rank's sequences: (L,) of its own part of their losses, (L,) of the whole of them, and how many
    have a token."""
    assert tokens.sequence_ST is not None
    # A product of matrices has a fixed order of summation, which `index_add` on GPUs has not.
    in_ST = tokens.sequence_ST.float() * one_T
    found = []
    for logits_TE in logits_LTE:
        score_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        chosen_TK = score_TE.detach().topk(top_k, dim=-1).indices
        chosen_TE = torch.zeros_like(score_TE.detach()).scatter_(1, chosen_TK, 1.0)
        share_TE = score_TE / score_TE.sum(-1, keepdim=True)
        found.append(torch.stack([in_ST @ chosen_TE, in_ST @ share_TE]))
    own_LXSE = torch.stack(found)
    all_LXSE, tokens_S = own_LXSE.detach().clone(), in_ST.sum(1)
    for group in tokens.divided:
        dist.all_reduce(all_LXSE, group=group)
        dist.all_reduce(tokens_S, group=group)
    rows, tokens_S1 = (tokens_S > 0).float().sum(), tokens_S.clamp(min=1.0).unsqueeze(1)
    f_LSE = all_LXSE[:, 0] * (all_LXSE.shape[-1] / top_k) / tokens_S1
    own_L, whole_L = ((f_LSE * part[:, 1] / tokens_S1).sum((1, 2)) for part in (own_LXSE, all_LXSE))
    return own_L, whole_L, rows
