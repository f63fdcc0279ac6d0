"""Limits on the ranks of a token, dropped choices, and routers in float32, for the routers of transformers.

    limit_routing(model, LimitOptions(limit_ranks=2))       # on all ranks; None: no limit any more (LOSSY)

The top-k of each router is answered (carpool/hf/routing/router_answers.py) with the best K *within the limits*
(carpool/routing/limit.py). Where a router has no such top-k (hash routing, Phi-MoE's sampler), choices outside the
limit are dropped, and the weights of the others scaled up to the same sum.

A balance loss sees the router's logits: it balances what the router wants, not what the limit leaves of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from carpool.hf.routing.router_answers import AnsweredRouter
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import find_router
from carpool.routing import DropOptions, Routing, router_logits
from carpool.routing.limit import LimitOptions, RoutingLimit, drop_outside


def limit_routing(model: nn.Module, options: LimitOptions | None) -> list[str]:
    """Limit the routing of all MoE layers of a model; `options` None: no longer. On all ranks alike, between steps.

    Returns:
        What that changes of the model's function, for logs. ValueError: limits that do not fit the model.
    """
    layers = required_rides(model)
    ranks, limits = next(iter(layers.values())).num_ranks, list[LayerLimit]()
    if options is not None:
        options.check(ranks)
        if options.active(ranks):
            limits = [
                LayerLimit(own, find_router(model, name), RoutingLimit(options, ranks)) for name, own in layers.items()
            ]
    for own in layers.values():
        if own.router_limit is not None:
            own.router_limit.remove()
    for limit in limits:
        limit.install()
    return options.lossy_reasons(ranks) if options is not None else []


class LayerLimit:
    """The limit of one layer: between its router's top-k and its ride.

    A router whose top-k is not answered is known from that at its ride, which then drops choices instead."""

    def __init__(self, own: ExpertRides, router: nn.Module | None, limit: RoutingLimit) -> None:
        self.own, self.router, self.limit = own, router, limit
        self._answered = False

    def install(self) -> None:
        """Answer the router's top-k from now on."""
        self.own.limit, self.own.router_limit = self.limit, self
        if self.router is not None:
            self.router.forward = AnsweredRouter(self.router.forward, self.own.num_experts, self.choose)

    def remove(self) -> None:
        """Leave the router and the layer as they were."""
        if self.router is not None:
            answered: Any = self.router.forward
            self.router.forward = answered.forward
        self.own.limit = self.own.router_limit = None

    def choose(self, score_TE: torch.Tensor, share_TE: torch.Tensor, top_k: int) -> torch.Tensor:
        """The router's choices within the limit."""
        self._answered = True
        return self.limit.choose(score_TE, share_TE, top_k, self.own.layout)

    def before_ride(self, routing: Routing) -> Routing:
        """The routing within the limit."""
        assert routing.weight_TK is not None
        answered, self._answered = self._answered, False
        if answered:
            return routing
        return Routing(*drop_outside(self.limit, routing.expert_TK, routing.weight_TK, self.own.layout))


# ---------------------------------------------------------------------------------------------------------------------
# Choices that are dropped (LOSSY), and routers that compute in float32.
#
#     drop_choices(model, DropOptions(capacity_factor=1.25))      # on all ranks, between steps; DropOptions(): nothing
#     route_in_float32(model)                                     # once
#
# Choices are dropped between the router and the ride: one that is dropped does not travel, and a token that loses all
# goes on with its residual alone. Capacity is of one rank's tokens of a micro-batch.
#
# In float32 (Switch Transformer, arXiv 2101.03961, section 2.4, "selective precision"): while a router's forward runs,
# a `TorchFunctionMode` answers the product that makes its logits, a `linear` with a row per expert, in float32.


def drop_choices(model: nn.Module, options: DropOptions, top_k: int) -> list[str]:
    """Drop choices in all MoE layers of a model from now on, or no longer. On all ranks alike, between steps.

    Args:
        top_k: K of the model's routers.

    Returns:
        What that changes of the model's function, for logs. ValueError: options that do not fit K.
    """
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
