"""From logits to choices, weights and the balance losses.

`route` says in plain PyTorch what becomes of logits. On CUDA `carpool.routing.kernel` does the same in one pass,
forward and backward. Both choose alike: of equal scores the lower expert id wins.

The balance losses are of the statistics of the whole batch:

  - auxiliary loss (Switch Transformer, section 2.2; GShard): E * sum_e f_e * P_e, where f_e is the share of choices
    that went to expert e and P_e the mean probability; 1.0 when balanced.
  - z-loss (ST-MoE, section 2.2): mean of logsumexp(logits)^2, which keeps the router's logits small.

The auxiliary loss is a product of two means, and so it is not linear in the batch: the mean of the ranks' losses is not
the loss of the batch. So both means are summed over all ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.kernels.device import on_gpu
from carpool.routing.routing import Routed, Rule, sum_over


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """(T, E) float32 logits (float64 for such tokens or weights), also under autocast: a bf16 softmax over hundreds of
    experts changes which are chosen.

    Tokens and weights of bfloat16 are multiplied on tensor cores on CUDA, others as float32; both add in float32."""
    with torch.autocast(x_TH.device.type, enabled=False):
        if x_TH.dtype == weight_EH.dtype == torch.bfloat16 and on_gpu(x_TH):
            from carpool.routing.logits import logits

            return logits(x_TH, weight_EH)
        wide = torch.float64 if torch.float64 in (x_TH.dtype, weight_EH.dtype) else torch.float32
        return F.linear(x_TH.to(wide), weight_EH.to(wide))


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor | None,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Routed:
    """From logits to choices, weights and the balance loss: on CUDA by kernels, elsewhere (and for float64) by plain
    PyTorch, which defines what they compute.

    Args:
        bias_E: added to the scores for the selection, or None.
        expert_TK: keep these choices and weigh them (replay), or None: choose.
        groups: over which the statistics of the balance loss are summed.
    """
    if logits_TE.dtype == torch.float32 and on_gpu(logits_TE):
        from carpool.routing import kernel as routing_kernel

        return routing_kernel.route(logits_TE, bias_E, expert_TK, rule, groups)
    prob_TE = scores(logits_TE, rule)
    if expert_TK is None:
        with torch.no_grad():
            expert_TK = best(selection(logits_TE, prob_TE, bias_E, rule), rule.top_k).int()
    index_TK = expert_TK.clamp(min=0).long()
    weight_TK = prob_TE.gather(1, index_TK).masked_fill(expert_TK < 0, 0.0)
    if rule.normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp(min=1e-20)
    weight_TK = weight_TK * rule.scaling_factor
    count_E = torch.zeros(logits_TE.shape[1], dtype=torch.int64, device=logits_TE.device)
    count_E.scatter_add_(0, index_TK.reshape(-1), (expert_TK >= 0).long().reshape(-1))
    return Routed(expert_TK, weight_TK, aux_loss(logits_TE, prob_TE, count_E, rule, groups), count_E)


def scores(logits_TE: torch.Tensor, rule: Rule) -> torch.Tensor:
    return logits_TE.softmax(-1) if rule.score == "softmax" else logits_TE.sigmoid()


def selection(logits_TE: torch.Tensor, prob_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """(T, E): what experts are selected by, the best K, best first. Of equal ones the lower id wins, and NaN is above
    all.

    Scores rise with logits, so where nothing is added to or among them logits are compared: they have fewer ties, and
    do not depend on how a device computes `exp`."""
    choice_TE = prob_TE if bias_E is not None or rule.num_groups > 1 else logits_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    if rule.num_groups > 1:
        choice_TGe = choice_TE.unflatten(1, (rule.num_groups, -1))
        group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(-1)
        best_TG = best(group_TG, rule.topk_groups)
        open_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        choice_TE = choice_TGe.masked_fill(~open_TG.unsqueeze(-1), -math.inf).flatten(1)
    return choice_TE


def best(value_TN: torch.Tensor, count: int) -> torch.Tensor:
    """As `topk(count).indices`, which leaves open which of equal ones it takes."""
    return value_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def aux_loss(
    logits_TE: torch.Tensor,
    prob_TE: torch.Tensor,
    count_E: torch.Tensor,
    rule: Rule,
    groups: Sequence[dist.ProcessGroup],
) -> torch.Tensor:
    """Both losses of the batch, weighted by the rule's coefficients: a scalar, the same on every rank. Its gradient is
    this rank's part times the number of ranks, so that the mean over ranks is the gradient of the batch's loss.

    Args:
        logits_TE, prob_TE: of this rank's tokens; scores that are no shares (sigmoid) are made such.
        count_E: (E,) int64, choices of each expert by these tokens.
        groups: over which the statistics are summed, one after another."""
    if not (rule.aux_loss_coef or rule.z_loss_coef):
        return logits_TE.new_zeros(())
    num_experts = logits_TE.shape[1]
    prob_TE = prob_TE / prob_TE.sum(-1, keepdim=True)  # a no-op for softmax; makes sigmoid scores shares
    prob_E = prob_TE.sum(0)
    z = logits_TE.logsumexp(-1).square().sum()
    tokens = logits_TE.new_full((1,), float(logits_TE.shape[0]))
    total = torch.cat([count_E.to(z.dtype), prob_E.detach(), z.detach().view(1), tokens])
    ranks = sum_over(total, groups)
    count_all_E, prob_all_E, z_all, tokens_all = total.split([num_experts, num_experts, 1, 1])
    share_E = count_all_E / count_all_E.sum().clamp(min=1.0)
    # The loss is linear in P once f is global. So each rank differentiates its own part, scaled by the number
    # of ranks because the caller averages over them, and no gradient has to travel.
    scale = ranks / tokens_all.squeeze(0).clamp(min=1.0)
    own = rule.aux_loss_coef * num_experts * (share_E * prob_E).sum() * scale + rule.z_loss_coef * z * scale
    value = (
        rule.aux_loss_coef * num_experts * (share_E * prob_all_E).sum() + rule.z_loss_coef * z_all.squeeze(0)
    ) / tokens_all.squeeze(0).clamp(min=1.0)
    return own + (value - own).detach()
