"""What the plain router and its kernel share: the rule, the result, and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist


class Rule(NamedTuple):
    """How to score, select, weigh and balance; fields as the arguments of `Router`."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 0
    topk_groups: int = 0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


class Routed(NamedTuple):
    """What becomes of logits.

    Attributes:
        expert_TK: (T, K) int32, best first.
        weight_TK: (T, K), differentiable.
        aux_loss: scalar, differentiable.
        count_E: (E,) int64, choices of each expert by these tokens.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    aux_loss: torch.Tensor
    count_E: torch.Tensor


def sum_over(total: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> int:
    """Sum in place over all ranks of the groups, one group after another; how many ranks they are."""
    ranks = 1
    for group in groups:
        dist.all_reduce(total, group=group)
        ranks *= dist.get_world_size(group)
    return ranks
