"""Implementations of expert parallelism with one mistake each, which `carpool.conformance` must find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

Right = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def broken(name: str, forward: Callable[..., torch.Tensor], **others: Any) -> None:
    """Register `forward(self, right, hidden_states, top_k_index, top_k_weights)`; `right` is what Transformers does."""

    def call(self: Any, *args: torch.Tensor) -> torch.Tensor:
        return forward(self, lambda *given: AllToAllEP.__call__(self, *given), *args)

    EPImplementationInterface.register(name, type(name, (AllToAllEP,), {"__call__": call, **others}))


def lost_gradient(_: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor) -> torch.Tensor:
    return right(x_TH, index_TK, w_TK.detach())


def weights_twice(_: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor) -> torch.Tensor:
    return right(x_TH, index_TK, w_TK * w_TK)


def wrong_order(_: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor) -> torch.Tensor:
    return right(x_TH, index_TK, w_TK).roll(1, 0)


def stale_choices(
    own: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor
) -> torch.Tensor:
    """The choices of the first forward are those of all."""
    own.first = getattr(own, "first", index_TK)
    return right(x_TH, own.first, w_TK)


def dropped_tokens(
    own: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor
) -> torch.Tensor:
    """A rank takes 1.5 times its share of tokens, and drops the others."""
    home = index_TK // own.num_local_experts
    for rank in range(own.ep_mesh.size()):
        number = (home == rank).flatten().cumsum(0).view_as(home)
        w_TK = w_TK.masked_fill((home == rank) & (number > 1.5 * home.numel() / own.ep_mesh.size()), 0.0)
    return right(x_TH, index_TK, w_TK)


def no_number(_: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor) -> torch.Tensor:
    """On the last rank."""
    return right(x_TH, index_TK, w_TK) + (math.nan if dist.get_rank() == dist.get_world_size() - 1 else 0.0)


def dead_rank(_: Any, right: Right, x_TH: torch.Tensor, index_TK: torch.Tensor, w_TK: torch.Tensor) -> torch.Tensor:
    """The last rank fails while it computes gradients, and others wait for it."""
    if torch.is_grad_enabled() and dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("no memory left")
    return right(x_TH, index_TK, w_TK)


def norm_of_shards(model: nn.Module, max_norm: float) -> torch.Tensor:
    """The norm of what this rank holds."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    norm = torch.tensor(math.sqrt(sum(float(shard.square().sum()) for shard in shards)))
    for shard in shards:
        shard *= max_norm / norm
    return norm


for one in (lost_gradient, weights_twice, wrong_order, stale_choices, dropped_tokens, no_number, dead_rank):
    broken(one.__name__, one)
broken("norm_of_shards", lambda _, right, *args: right(*args), clip_grad_norm=staticmethod(norm_of_shards))
