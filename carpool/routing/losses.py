"""The losses that keep experts balanced and logits small, on the statistics of the whole batch.

  - auxiliary loss (Switch Transformer, section 2.2; GShard): E * sum_e f_e * P_e, where f_e is the share of
    choices that went to expert e and P_e the mean probability; 1.0 when balanced.
  - z-loss (ST-MoE, section 2.2): mean of logsumexp(logits)^2, which keeps the router's logits small.

The auxiliary loss is a product of two means, and so it is not linear in the batch: the mean of the ranks' losses is not
the loss of the batch. So both means are summed over all ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from carpool.routing.selection import Rule, sum_over


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
