"""Balancing without a loss: a bias per expert that moves against the load.

The bias is added to the scores for the selection only, so weights and gradients do not see it (auxiliary-loss-free
balancing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2). After each optimizer step

    bias_e += rate * sign(mean load - load_e)

where the load is that of the whole batch: all ranks' tokens, all micro-batches, each token once.

    load [6, 2, 4, 4], rate 0.001  ->  bias += [-0.001, 0.001, 0, 0]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from carpool.metrics.counters import add_once
from carpool.routing.routing import sum_over


@torch.no_grad()
def count_choices(load_E: torch.Tensor, expert_TK: torch.Tensor) -> None:
    """Add to (E,) int64 loads how often (T, K) choices, -1: none, name each expert; once under checkpointing."""
    count_E = torch.zeros_like(load_E)
    count_E.scatter_add_(0, expert_TK.clamp(min=0).reshape(-1).long(), (expert_TK >= 0).reshape(-1).long())
    add_once(load_E, count_E)


@torch.no_grad()
def update_biases(
    biases: Sequence[torch.Tensor],
    loads: Sequence[torch.Tensor],
    rate: float,
    groups: Sequence[dist.ProcessGroup | None],
) -> None:
    """Move the biases of several layers towards balance, in place, and set their loads to zero. Collective.

    Args:
        biases: an (E,) tensor for each layer, equal on all ranks; it stays so, bit for bit.
        loads: an (E,) int64 tensor for each layer, choices of each expert by this rank's tokens.
        rate: the step.
        groups: over which loads are summed, one after another; together they cover all ranks that hold tokens of the
            batch. None as a group: the whole world. All layers share one reduction for each."""
    if not biases:
        return
    total = torch.cat(list(loads))
    sum_over(total, groups)
    for bias_E, load_E, all_E in zip(biases, loads, total.split([len(load_E) for load_E in loads]), strict=True):
        bias_E += rate * torch.sign(all_E.double().mean() - all_E.double()).to(bias_E.dtype)
        load_E.zero_()
