"""A backward in two parts, for pipeline stages: gradients of inputs, for which the previous stage waits, and of
weights.

    split = SplitBackward(model, rides(model).values())
    with split:
        loss.backward()                 gradients of inputs, and of norms, routers and embeddings
        weights = split.weights()       the deferred gradients of this backward
        ...                             a forward, another backward
        weights()                       gradients of linear layers and experts

Zero-bubble schedules (arXiv 2401.10241; DualPipe, arXiv 2412.19437) compute the second part where a rank would wait.
PyTorch can split any graph, but runs it twice then, and a ride would send its tokens twice. Here each expensive layer
defers its weight gradients (`carpool.ride.setup`):

  - Linear layers: dW = dy' x. x and dy stay in memory until then.
  - Experts: of the up projection, which are two thirds of a gated expert's. Those of the down projection are computed
    at once, because the gradients that have arrived are in buffers that the next ride overwrites. The tokens and the
    gradients of the pre-activations stay in memory until then (of the worst-case size where only the device knows the
    number of tokens). With tokens that are offloaded or sent again, experts defer nothing.

Compiled layers are cut at what defers (`torch.compiler.disable`): a graph of the compiler owns what it saves, and its
backward has nowhere to put it. What is between two linear layers is still few kernels.

The products and their order are those of a single backward. FSDP reduces gradients of the first part after the
backward, and the others after `weights()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.activations.whole_layers import offloaded
from carpool.parallel import fsdp
from carpool.ride.function import first_order
from carpool.ride.setup import DeferredGradients


class Rides(Protocol):
    """A layer whose rides can defer weight gradients."""

    deferred: DeferredGradients | None


class SplitBackward:
    """Context in which backwards of `model` defer weight gradients to `weights`. On all ranks.

    Args:
        model: sharded by FSDP2 or not.
        layers: its MoE layers.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Rides]) -> None:
        self.model, self.layers, self.deferred = model, list(layers), DeferredGradients()
        # Modules with a forward of their own, such as adapters, are not split.
        modules = (module for module in model.modules() if type(module) is nn.Linear)
        linears = [module for module in modules if "forward" not in vars(module)]
        # Made once: compiled layers look for the same functions in each step.
        self.forwards = [(linear, partial(self._forward, linear)) for linear in linears]

    def __enter__(self) -> SplitBackward:
        for layer in self.layers:
            layer.deferred = self.deferred
        for linear, forward in self.forwards:
            # An attribute of the instance takes precedence over the class's method.
            linear.forward = forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            layer.deferred = None
        for linear, _ in self.forwards:
            del linear.forward
        self.deferred.take()

    def weights(self) -> Callable[[], None]:
        """A function that computes the weight gradients of the backwards since the last call."""
        compute = self.deferred.take()

        def weights() -> None:
            compute()
            fsdp.end_backward(self.model)

        return weights

    @torch.compiler.disable
    def _forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = linear.weight
        bias: torch.Tensor | None = linear.bias
        if isinstance(weight, DTensor) or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return F.linear(x, weight, bias)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        y: torch.Tensor = _Linear.apply(x, self.deferred, (weight, bias))
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, deferred: DeferredGradients, parameters: tuple[torch.Tensor, torch.Tensor | None]
    ) -> torch.Tensor:
        weight, bias = (None if one is None else one.detach() for one in parameters)
        assert weight is not None
        if (layer := offloaded.get()) is not None:
            layer.stay_on_device((weight,))
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.parameters = deferred, parameters
        return F.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy_TN, x_TH = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        biased = ctx.parameters[1] is not None
        ctx.deferred.put(ctx.parameters, lambda: (dy_TN.t() @ x_TH, dy_TN.sum(0) if biased else None))
        return (dy_TN @ weight).view(x.shape), None, None
