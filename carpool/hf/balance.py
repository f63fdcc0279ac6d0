"""The balance loss of transformers' models, on the statistics of the whole batch.

Models such as OLMoE, Mixtral and Qwen-MoE add `router_aux_loss_coef` times a load-balancing loss (Switch Transformer,
section 2.2): E * sum_e f_e * P_e, with f_e the choices of expert e per token and P_e its mean probability, over the
tokens of all layers; K when balanced. Their own code takes f and P from the tokens of one rank. A product of two
means is not linear in the batch, so the mean of the ranks' losses is not the loss of the batch: with few tokens per
rank it punishes every rank for not being balanced by itself. Here f is summed over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def balance_loss(
    router_logits: Sequence[torch.Tensor], top_k: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The load-balancing loss over all layers and all ranks of `group`.

    Args:
        router_logits: one (T, E) tensor for each MoE layer, as models return with `output_router_logits=True`.
        top_k: K of the router.
        group: all ranks that hold tokens of the batch; None: the whole world, if there is one.

    Returns:
        Scalar float32, the same value on every rank. Its gradient is this rank's share times the number of ranks, so
        that averaging gradients over ranks (FSDP, DDP) gives the gradient of the batch's loss.
    """
    num_experts = router_logits[0].shape[-1]
    prob_E = router_logits[0].new_zeros(num_experts, dtype=torch.float32)
    count_E = torch.zeros_like(prob_E)
    tokens = 0
    for logits_TE in router_logits:
        prob_TE = logits_TE.float().softmax(-1)
        chosen = prob_TE.detach().topk(top_k, dim=-1).indices.reshape(-1)
        count_E = count_E.scatter_add(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
        prob_E = prob_E + prob_TE.sum(0)
        tokens += logits_TE.shape[0]
    total = torch.cat([count_E, prob_E.detach(), count_E.new_tensor([float(tokens)])])
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    tokens_all = total[-1].clamp(min=1.0)
    f_E = total[:num_experts] / tokens_all
    # Linear in P once f is global: each rank differentiates its own part and no gradient has to travel.
    own = num_experts * (f_E * prob_E).sum() * ranks / tokens_all
    value = num_experts * (f_E * total[num_experts : 2 * num_experts]).sum() / tokens_all
    return own + (value - own).detach()
