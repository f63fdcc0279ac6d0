"""From logits to choices, weights and the balance losses.

`route` says in plain PyTorch what becomes of logits. On CUDA `carpool.routing.kernel` does the same in one pass,
forward and backward. Both choose alike: of equal scores the lower expert id wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carpool.kernels.device import on_gpu
from carpool.routing.selection import Routed, Rule, aux_loss


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
