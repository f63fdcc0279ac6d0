"""The balance loss of transformers' models, on the statistics of the whole batch.

Models such as OLMoE, Mixtral and Qwen-MoE add `router_aux_loss_coef` times a load-balancing loss (Switch Transformer,
section 2.2): E * sum_e f_e * P_e, with f_e the choices of expert e per token and P_e its mean probability, over the
tokens of all layers together; K when balanced. Their own code takes f and P from the tokens of one rank. A product of
two means is not linear in the batch, so the mean of the ranks' losses is not the loss of the batch: with few tokens per
rank it punishes every rank for not being balanced by itself. Here f is summed over all ranks.

All layers together can be balanced while none is: expert 3 hot in one layer, cold in another. But ranks wait for each
other in each layer. `per_layer` takes the mean of every layer's own loss, as in the papers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def balance_loss(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    group: dist.ProcessGroup | None = None,
    *,
    per_layer: bool = False,
    padding_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """The load-balancing loss over all layers and all ranks of `group`.

    Args:
        router_logits: one (T, E) tensor for each MoE layer, as models return with `output_router_logits=True`, or
            `carpool.hf.routing.router_logits` collects them.
        top_k: K of the router.
        group: all ranks that hold tokens of the batch; None: the whole world, if there is one.
        per_layer: the mean of the layers' losses; else the loss of all layers' tokens together, as in transformers.
        padding_T: true where there is no token but padding, which counts nothing. None: there is none.

    Returns:
        Scalar float32, the same value on every rank. Its gradient is this rank's share times the number of ranks, so
        that averaging gradients over ranks (FSDP, DDP) gives the gradient of the batch's loss.
    """
    return loss_of_statistics(router_statistics(router_logits, top_k, padding_T), group, per_layer=per_layer)


def router_statistics(
    router_logits: Sequence[torch.Tensor], top_k: int, padding_T: torch.Tensor | None = None
) -> torch.Tensor:
    """What the loss needs of this rank's tokens: (layers, 2E + 1) float32, a row for each of `router_logits`.

    In a row are the choices of each expert, the sum of its probabilities, which is differentiable, and the number of
    tokens. The stages of a pipeline add their layers' rows, and the last one computes the loss of all layers.
    """
    rows = []
    counts_T1 = None if padding_T is None else (~padding_T).float().unsqueeze(1)
    for logits_TE in router_logits:
        prob_TE = logits_TE.float().softmax(-1)
        chosen_TK = prob_TE.detach().topk(top_k, dim=-1).indices
        if counts_T1 is None:
            one_TK = torch.ones_like(chosen_TK, dtype=torch.float32)
            # Not `new_tensor`, which waits for the device.
            tokens = prob_TE.new_full((1,), float(logits_TE.shape[0]))
        else:
            prob_TE, one_TK, tokens = prob_TE * counts_T1, counts_T1.expand_as(chosen_TK), counts_T1.sum().view(1)
        count_E = prob_TE.new_zeros(prob_TE.shape[1]).scatter_add(0, chosen_TK.reshape(-1), one_TK.reshape(-1))
        rows.append(torch.cat([count_E, prob_TE.sum(0), tokens]))
    return torch.stack(rows)


def loss_of_statistics(
    own_GS: torch.Tensor, group: dist.ProcessGroup | None = None, *, per_layer: bool = False
) -> torch.Tensor:
    """`balance_loss`, of what `router_statistics` has returned for all layers."""
    # G: what is balanced by itself, each layer or all of them.
    if not per_layer:
        own_GS = own_GS.sum(0, keepdim=True)
    num_experts = own_GS.shape[1] // 2
    prob_GE, total_GS = own_GS[:, num_experts : 2 * num_experts], own_GS.detach().clone()
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(total_GS, group=group)
        ranks = dist.get_world_size(group)
    count_GE, prob_all_GE, tokens_G1 = total_GS.split([num_experts, num_experts, 1], dim=1)
    tokens_G1 = tokens_G1.clamp(min=1.0)
    f_GE = count_GE / tokens_G1
    # Linear in P once f is global: each rank differentiates its own part and no gradient has to travel.
    own = num_experts * (f_GE * prob_GE / tokens_G1).sum(1).mean() * ranks
    value = num_experts * (f_GE * prob_all_GE / tokens_G1).sum(1).mean()
    return own + (value - own).detach()
