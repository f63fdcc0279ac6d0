"""A backward in two, for stages of a pipeline: the gradients for which the stage before waits, and those of weights.

    split = SplitBackward(model, rides(model).values())
    with split:
        loss.backward()                 gradients of inputs; norms, routers and embeddings get theirs, too
        weights = split.weights()       of this backward
        ...                             a forward, another backward
        weights()                       gradients of linear layers and experts

Zero-bubble schedules (arXiv 2401.10241; DualPipe, arXiv 2412.19437) put the second part where a rank would wait.
PyTorch can take any graph apart, but walks it twice then, and a ride would send its rows twice. Here each layer that
has much to compute leaves that part to later (`carpool.ride.setup`):

  - linear layers: dW = dy' x. Kept until then: x and dy.
  - experts: of the up projection, two thirds of what gated experts compute for weights. The down projection's is
    computed at once, because the gradients that have arrived lie in buffers that the next ride gets. Kept until then:
    the rows, and gradients of the pre-activations (of the worst-case size where only the device knows how many rows
    came). Rows that are offloaded or sent again are not kept, so their experts compute all at once.

The same products of the same tensors, in the order of the backward. FSDP reduces after a backward what has come with
it, and after `weights()` the rest.
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
    """A layer that rides."""

    deferred: DeferredGradients | None


class SplitBackward:
    """Inside, backwards of `model` leave weight gradients to `weights`. All ranks alike.

    Args:
        model: sharded by FSDP2 or not.
        layers: its layers that ride.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Rides]) -> None:
        self.model, self.layers, self.deferred = model, list(layers), DeferredGradients()
        # What has a forward of its own, such as an adapter, does as ever.
        modules = (module for module in model.modules() if type(module) is nn.Linear)
        self.linears = [module for module in modules if "forward" not in vars(module)]

    def __enter__(self) -> SplitBackward:
        for layer in self.layers:
            layer.deferred = self.deferred
        for linear in self.linears:
            # nn.Module's call finds an attribute of the instance before the class's.
            linear.forward = partial(self._forward, linear)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.deferred = None
        for linear in self.linears:
            del linear.forward
        self.deferred.take()

    def weights(self) -> Callable[[], None]:
        """What computes the weight gradients of the backwards since the last call."""
        compute = self.deferred.take()

        def weights() -> None:
            compute()
            fsdp.end_backward(self.model)

        return weights

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
