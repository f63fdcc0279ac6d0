"""Weight gradients of linear layers, put off into the next ride of the backward.

A linear layer's backward has two products: dx = dy W, for which the layers before it wait, and dW = dy' x, for which
nobody does before the gradients are reduced. At its end an MoE decoder layer's backward is attention's; then comes the
layer before, which begins with a ride, and has nothing to compute until its gradients have arrived:

    at once    attn 4: dx dW dx dW dx dW   dispatch . . . . .   experts 3   ...
    put off    attn 4: dx dx dx            dispatch              experts 3   ...
                                           attn 4: dW dW dW

(LANCET, arXiv 2404.19429, moves such products of any layer into rides; Megatron those of one layer.) The window at the
end of a ride, its combine, has the experts' own weight gradient already (`carpool.schedule.chunks`).

Which: every `nn.Linear` of the decoder layers that ride, attention's above all, but not the output layer's: its dW may
take longer than many rides, and its dy is the largest tensor of the step. Where one layer's products exceed its ride,
what is too much is computed before the experts, as late as without this: nothing is lost but memory, for x and dy stay
until then.

With FSDP2 the window exists only if FSDP waits, too: at the end of a layer's backward it reduces what gradients there
are. `carpool.schedule.priority` makes it wait. Without FSDP nobody reduces before the backward has ended.

The same products of the same tensors, added to `weight.grad` as autograd does: the same bits. (But where a layer is
used twice, autograd adds both to each other first, then to what micro-batches before have left.) Hooks on a
parameter's gradient are not called. Weights that are not plain tensors (tensor parallelism), and compiled layers,
do as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from carpool.observe.meter import shown


class _Put(NamedTuple):
    """A weight gradient that is to be computed: of weight (N, H) and bias (N,) from dy (T, N) and x (T, H)."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    dy_TN: torch.Tensor
    x_TH: torch.Tensor


class Delayed:
    """The linear layers of a model whose weight gradients wait for a ride, while `started`.

    Args:
        model: holds `layers`.
        layers: names of the modules that ride, such as "model.layers.3.mlp.experts".

    Raises:
        ValueError: no linear layer is in a decoder layer with one of these, or DistributedDataParallel waits for
            gradients at once.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError(
                "weight gradients cannot be put off under DistributedDataParallel, which reduces each when autograd "
                "has it; shard the model by FSDP2 (fully_shard), or use carpool.reduce_gradients"
            )
        layers = set(layers)
        decoders = {prefix for name in layers if (prefix := decoder_layer(name)) is not None}
        self.linears: dict[str, nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and decoder_layer(name) in decoders
            and not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
            # Somebody else's forward, such as an adapter's.
            and "forward" not in vars(module)
        }
        if not self.linears:
            raise ValueError("there are no weight gradients to put off: no nn.Linear beside experts in a decoder layer")
        self._waiting: list[_Put] = []

    def start(self) -> None:
        """From now on, weight gradients wait."""
        for linear in self.linears.values():
            # nn.Module's call finds an attribute of the instance before the class's.
            linear.forward = partial(self._forward, linear)  # type: ignore[method-assign]

    def stop(self) -> None:
        """The layers are again as they were; what waits is forgotten."""
        for linear in self.linears.values():
            vars(linear).pop("forward", None)
        self._waiting.clear()

    def compute(self) -> None:
        """Compute what waits, in the order of the backward, and add it to the parameters' gradients."""
        if not self._waiting:
            return
        with torch.no_grad(), shown("carpool::delayed-weight-gradients"):
            while self._waiting:
                # Taken off one by one, so that what each needed is freed.
                _compute(self._waiting.pop(0))

    def _forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight, bias = linear.weight, linear.bias
        plain = isinstance(x, DTensor) or isinstance(weight, DTensor) or torch.compiler.is_compiling()
        if plain or not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
            return F.linear(x, weight, bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        y: torch.Tensor = _Linear.apply(x, weight, bias, dtype, self._waiting.append)
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None,
        put: Callable[[_Put], None],
    ) -> torch.Tensor:
        ctx.put, ctx.x_dtype = put, x.dtype
        # Not as saved tensors alone: it must be this very parameter that gets the gradient.
        ctx.parameters = weight, bias
        with torch.autocast(x.device.type, enabled=False):
            x_, weight_, bias_ = (t if t is None or dtype is None else t.to(dtype) for t in (x, weight, bias))
            assert x_ is not None and weight_ is not None
            ctx.save_for_backward(x_, weight_)
            return F.linear(x_, weight_, bias_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy_TN, x_TH = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        weight_, bias_ = ctx.parameters
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.put(_Put(weight_ if needs_weight else None, bias_ if needs_bias else None, dy_TN, x_TH))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return dy_TN.mm(weight).view(x.shape).to(ctx.x_dtype), None, None, None, None


def _compute(put: _Put) -> None:
    if put.weight is not None:
        _add(put.weight, put.dy_TN.t().mm(put.x_TH))
    if put.bias is not None:
        _add(put.bias, put.dy_TN.sum(0))


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def decoder_layer(name: str) -> str | None:
    """The decoder layer that a module is in: "model.layers.3.mlp.experts" -> "model.layers.3"; None if in none."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])
