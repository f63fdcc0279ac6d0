"""Sequence parallelism: between tensor-parallel blocks, each tensor-parallel rank has its own tokens.

With tensor parallelism alone (Megatron-LM, arXiv 1909.08053) every rank has all tokens between two blocks: norms,
routers and residuals are computed tp times, and each block ends with an all-reduce. An all-reduce is a reduce-scatter
and an all-gather. Sequence parallelism (Korthikanti et al., arXiv 2205.05198) computes norms, routers and residuals
between these two, so that each token is computed and saved on one rank only:

    own tokens   norm   [all-gather] column-parallel ... row-parallel [reduce-scatter]   residual   norm   router
    backward            [reduce-scatter]                              [all-gather]

The tokens of all sequences are concatenated; rank r of n has tokens r * ceil(T / n) up to the next rank's. The last
ranks may have fewer, or none.

    T = 5, n = 2    rank 0: tokens 0 1 2    rank 1: tokens 3 4

The gradient of an activation with all tokens is either *partial*, one term of a sum over the ranks (as from a
column-parallel layer), or equal on every rank (as from a computation that all ranks repeat). The argument or name of
each function says which it expects; the wrong one is off by the number of ranks.

A checkpointed region (`carpool.activations.whole_layers`) saves the results of collectives, so that its recomputation
communicates nothing: communication-aware checkpointing (DeepSpeed-TED, arXiv 2303.06318, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from carpool.activations.whole_layers import checkpointed

Group = dist.ProcessGroup | None
Compute = Callable[[torch.Tensor], torch.Tensor]
# Newer releases of torch rename these, and warn about the names of torch 2.11.
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def tokens_per_rank(tokens: int, group: Group) -> int:
    """The largest number of tokens of a rank, of T in all."""
    return -(-tokens // dist.get_world_size(group))


def own_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of all T tokens (dimension 0), as a view."""
    each = tokens_per_rank(x.shape[0], group)
    first = min(x.shape[0], dist.get_rank(group) * each)
    return x[first : first + each]


def split_tokens(x_TH: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's tokens of an activation that is equal on every rank. Backward: an all-gather of the gradients."""
    tokens = x_TH.shape[0]
    return _apply(x_TH, lambda x: own_tokens(x, group).clone(), lambda dy_RH: _all_gather(dy_RH, tokens, group))


def gather_tokens(x_RH: torch.Tensor, tokens: int, group: Group, *, partial: bool) -> torch.Tensor:
    """All T tokens (all-gather).

    Args:
        tokens: T.
        partial: the gradients of the output are terms of a sum over the ranks; else they are equal on all."""
    backward = _reduce_scatter if partial else own_tokens
    return _apply(x_RH, lambda x: _all_gather(x, tokens, group), lambda dy_TH: backward(dy_TH, group), save=True)


def scatter_sum(x_TH: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's tokens of the sum over ranks (reduce-scatter)."""
    tokens = x_TH.shape[0]
    return _apply(x_TH, lambda x: _reduce_scatter(x, group), lambda dy_RH: _all_gather(dy_RH, tokens, group), save=True)


def sum_over(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks (all-reduce), for computations that all ranks repeat."""
    return _apply(x, lambda x: _all_reduce(x, group), lambda dy: dy, save=True)


def gather_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All features (last dimension) from equal parts (all-gather), for computations that all ranks repeat."""
    return _apply(x, lambda x: _all_gather_features(x, group), lambda dy: _own_features(dy, group), save=True)


def split_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's features of an activation that is equal on every rank. Backward: an all-gather of the gradients."""
    return _apply(x, lambda x: _own_features(x, group).clone(), lambda dy: _all_gather_features(dy, group))


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Sum the gradients of parameters of which every rank has the same shard, but the gradient of its own tokens: one
    all-reduce for each dtype. To be called once per step, after the last backward.

    Collective. A parameter without a gradient must have none on all ranks."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            by_dtype.setdefault(local.dtype, []).append(local)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


# ------------------------------------------------------------------------------------------------------- collectives


def _all_gather(x_RH: torch.Tensor, tokens: int, group: Group) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    each = tokens_per_rank(tokens, group)
    x_RH = x_RH.contiguous()
    if x_RH.shape[0] < each:
        x_RH = torch.cat([x_RH, x_RH.new_zeros(each - x_RH.shape[0], *x_RH.shape[1:])])
    out = x_RH.new_empty(ranks * each, *x_RH.shape[1:])
    _all_gather_into(out, x_RH, group=group)
    return out[:tokens]


def _reduce_scatter(x_TH: torch.Tensor, group: Group) -> torch.Tensor:
    ranks, tokens = dist.get_world_size(group), x_TH.shape[0]
    each = tokens_per_rank(tokens, group)
    x_TH = x_TH.contiguous()
    if ranks * each > tokens:
        x_TH = torch.cat([x_TH, x_TH.new_zeros(ranks * each - tokens, *x_TH.shape[1:])])
    out = x_TH.new_empty(each, *x_TH.shape[1:])
    _reduce_scatter_into(out, x_TH, group=group)
    return out[: max(0, min(each, tokens - dist.get_rank(group) * each))]


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _all_gather_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous()
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    _all_gather_into(parts.flatten(0, 1), x, group=group)
    return torch.cat(parts.unbind(), dim=-1)


def _own_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    assert x.shape[-1] % ranks == 0, f"{x.shape[-1]} features do not divide over {ranks} ranks"
    return x.chunk(ranks, dim=-1)[dist.get_rank(group)]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Compute, backward: Compute) -> torch.Tensor:
        ctx.compute = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return ctx.compute(dy), None, None


def _apply(x: torch.Tensor, forward: Compute, backward: Compute, save: bool = False) -> torch.Tensor:
    """Run `forward`, with this backward. `save`: a checkpointed region saves the result for its recomputation."""
    if save and (region := checkpointed.get()) is not None:
        send = forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            return region.ride(lambda: (send(x), None))[0]

    out: torch.Tensor = _Collective.apply(x, forward, backward)
    return out
