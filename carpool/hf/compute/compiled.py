"""A model's decoder layers under `torch.compile`: what is between two rides becomes few kernels, and few launches.

    compile_layers(model)              each layer's forward; rides stay what they are (carpool/ride/operator.py)
    with eagerly(): ...                inside, layers run as if nobody had compiled them

Layers of one kind share their graphs: one for training, one for evaluation, one more when sizes change. But what hangs
hooks on the inside of a layer may cut its graph there: transformers, once it was asked for router logits (the trainer
does not ask: carpool/hf/routing/router_logits.py), and FSDP on experts that it shards by themselves
(carpool/hf/axes/dense.py). What is then left of a ride's own preparation (a few operations on choices) is compiled for
each layer anew, from the ninth on not at all, and PyTorch's log says so: `recompile_limit`. Rides themselves are the
same everywhere.

A layer that is computed again (`carpool.hf.activations.layer_policies`) is compiled inside of PyTorch's checkpoint, and
runs twice. Layers of Transformers call their checkpoint themselves, and a compiler that meets one compiles nothing.

What grows with each call, like the prefix of a text that is sampled, or looks into layers by hooks, runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from carpool.hf.routing.router_logits import add_collected, traced_logits, with_logits
from carpool.hf.seam.layers import decoder_layers
from carpool.hf.seam.rides import rides

# Of a layer's arguments, while it is computed again: as Transformers has it.
_NO_CACHE = {"use_cache": False, "past_key_values": None, "layer_past": None}


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the forward of each decoder layer, those without experts too.

    Args:
        model: its transport, experts and schedule have been chosen; they may change later, which compiles anew.
        backend: of `torch.compile`.

    Returns:
        How many layers there are.

    Raises:
        ValueError: a backend that this PyTorch does not have, or layers that cannot be found.
    """
    check_backend(backend)
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = _compiled(layer, backend)
    return len(layers)


def _compiled(layer: nn.Module, backend: str) -> Callable[..., Any]:
    """A layer's forward, compiled; its router logits go where they are collected."""
    own: Any = layer.forward
    # The class's function, which layers share. One that somebody put in its place is compiled for itself.
    function = own.__func__ if getattr(own, "__self__", None) is layer else _without_layer(own)
    inside, own_rides = _inside_checkpoint(function), list(rides(layer).values())
    checkpoints, function, sharded = inside is not function, inside, shards_inside(layer)
    run, traced = torch.compile(with_logits, backend=backend), traced_logits(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if checkpoints and layer.gradient_checkpointing and layer.training:
            if sharded:
                return own(*args, **kwargs)
            kwargs |= {name: value for name, value in _NO_CACHE.items() if name in kwargs}
            # What is made for the first time cuts the graph of the first forward, and not that of the second.
            settled = all(one.settled for one in own_rides)
            again, call = cast(Any, layer)._gradient_checkpointing_func, run if settled else with_logits
            out, logits = again(call, function, layer, traced, args, kwargs)
        else:
            out, logits = run(function, layer, traced, args, kwargs)
        if logits:
            add_collected(logits)
        return out

    return forward


def shards_inside(layer: nn.Module) -> bool:
    """Whether FSDP shards a part of a layer by itself, as it does with experts that several ranks hold. Its hooks cut
    the graphs of a forward and of its recomputation at different places, which PyTorch's checkpoint refuses: such a
    layer is computed again eagerly."""
    return any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer)


def _inside_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward without the checkpoint that `GradientCheckpointingLayer` puts around it."""
    while getattr(getattr(function, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        function = cast(Any, function).__wrapped__
    return function


def _without_layer(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: own(*args, **kwargs)


def check_backend(name: str) -> None:
    """Raise ValueError if `torch.compile` does not know this backend."""
    if name not in torch.compiler.list_backends(()):
        usual = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"torch.compile has no backend {name!r} here; those for users are {usual}")


def eagerly() -> AbstractContextManager[object]:
    """Inside, what was compiled runs as it was written."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
