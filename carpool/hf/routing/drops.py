"""Choices that are dropped (LOSSY), and routers that compute in float32, for the routers of transformers.

    drop_choices(model, DropOptions(capacity_factor=1.25))      # on all ranks, between steps; DropOptions(): nothing
    route_in_float32(model)                                     # once

Dropped is between the router and the ride, so it works with any router: a choice that is dropped becomes "no expert"
and does not travel, and a token that loses all of its choices goes on with its residual alone. A balance loss sees the
router's logits: what it wanted, not what was left of it. Capacity is of one rank's tokens of a micro-batch.

In float32 (Switch Transformer, arXiv 2101.03961, section 2.4, "selective precision"): while a router's forward runs, a
`TorchFunctionMode` answers the product that makes its logits, a `linear` with a row per expert, in float32, whatever
dtype tokens and weights have (`carpool.routing.router_logits`). What the router makes of the logits is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from carpool.hf.seam.layers import find_router
from carpool.hf.seam.rides import required_rides
from carpool.routing import DropOptions, router_logits


def drop_choices(model: nn.Module, options: DropOptions, top_k: int) -> list[str]:
    """Drop choices in all MoE layers of a model from now on, or no longer. On all ranks alike, between steps.

    Args:
        top_k: K of the model's routers.

    Returns:
        What that changes of the model's function, for logs.

    Raises:
        ValueError: options that do not fit K."""
    options.check(top_k)
    for own in required_rides(model).values():
        own.set_drops(options)
    return options.lossy_reasons


def route_in_float32(model: nn.Module) -> None:
    """Let all routers of a model make their logits in float32. Once, and before `limit_routing`, which may be undone.

    Raises:
        ValueError: a layer whose router is not found."""
    found = {name: (find_router(model, name), own.num_experts) for name, own in required_rides(model).items()}
    if unknown := [name for name, (router, _) in found.items() if router is None]:
        raise ValueError(f"the router of {unknown[0]} is not known: leave moe.router_float32 out")
    for router, num_experts in found.values():
        assert router is not None
        router.forward = _InFloat32(router.forward, num_experts)


class _InFloat32:
    """A router's forward with logits in float32."""

    def __init__(self, forward: Callable[..., Any], num_experts: int) -> None:
        self.forward, self.num_experts = forward, num_experts

    @torch._disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Linear(self.num_experts) as mode:
            out = self.forward(*args, **kwargs)
        if not mode.answered:
            raise ValueError(
                "moe.router_float32: this model's router makes its logits by something else than a linear layer, which "
                "Carpool does not compute in float32: leave it out"
            )
        return out


class _Linear(TorchFunctionMode):
    """Answers the product that makes logits; see the module's docstring."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.answered = num_experts, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            if weight.shape[0] == self.num_experts:
                self.answered = True
                sharded = isinstance(x, DTensor) or isinstance(weight, DTensor)
                logits = F.linear(x.float(), weight.float()) if sharded else router_logits(x, weight)
                return logits if bias is None else logits + bias.float()
        return func(*args, **kwargs)
