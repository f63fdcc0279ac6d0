"""A model's decoder layers under `torch.compile`: what is between two rides becomes few kernels, and few launches.

    compile_layers(model)              each layer's forward; rides stay what they are (carpool/ride/operator.py)
    with eagerly(): ...                inside, layers run as if nobody had compiled them

Layers of one kind share their graphs: one for training, one for evaluation, one more when sizes change. Hooks inside a
layer cut its graph: those of transformers, once it was asked for router logits (the trainer does not ask), and FSDP's
on experts that it shards by themselves. A layer that is computed again is compiled inside of PyTorch's checkpoint, and
runs twice: layers of Transformers call their checkpoint themselves, and a compiler that meets one compiles nothing.
What grows with each call, like the prefix of a text that is sampled, or looks into layers by hooks, runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from carpool.activations.offload import Offloader
from carpool.activations.whole_layers import ActivationOffload, keep_rides
from carpool.hf.routing.router_balance import add_collected, traced_logits, with_logits
from carpool.hf.seam.expert_rides import found_again, rides
from carpool.hf.seam.find_modules import decoder_layers
from carpool.planner.candidate import COMPILED_AGAIN
from carpool.ride.turns import half_number

# Of a layer's arguments, while it is computed again: as Transformers has it.
_NO_CACHE = {"use_cache": False, "past_key_values": None, "layer_past": None}


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the forward of each decoder layer, those without experts too; returns how many there are. Transport,
    experts and schedule have been chosen; changing them compiles anew.

    Raises:
        ValueError: a backend that this PyTorch does not have, or layers that cannot be found.
    """
    check_backend(backend)
    layers = decoder_layers(model)
    for own in rides(model).values():
        own.settle()
    for layer in layers:
        layer.forward = _compiled(layer, backend)
    return len(layers)


def _compiled(layer: nn.Module, backend: str) -> Callable[..., Any]:
    """A layer's forward, compiled; its router logits go where they are collected."""
    own: Any = layer.forward
    # The class's function, which layers share. One that somebody put in its place is compiled for itself.
    function = (
        own.__func__ if getattr(own, "__self__", None) is layer else lambda _, *args, **kwargs: own(*args, **kwargs)
    )
    inside, own_rides = _inside_checkpoint(function), list(rides(layer).values())
    checkpoints, function, sharded = inside is not function, inside, shards_inside(layer)
    run, traced = torch.compile(with_logits, backend=backend), traced_logits(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if checkpoints and layer.gradient_checkpointing and layer.training:
            if sharded and not COMPILED_AGAIN:
                return own(*args, **kwargs)
            kwargs |= {name: value for name, value in _NO_CACHE.items() if name in kwargs}
            # What is made for the first time cuts the graph of the first forward, and not that of the second.
            settled = all(one.settled for one in own_rides)
            again, call = cast(Any, layer)._gradient_checkpointing_func, run if settled else with_logits
            out, logits = again(call, function, layer, traced, args, kwargs)
        else:
            # A forward that makes transports would compile the pieces between them, for itself alone.
            made = all(one.transport is not None for one in own_rides)
            out, logits = (run if made else with_logits)(function, layer, traced, args, kwargs)
        if logits:
            add_collected(logits)
        return out

    return forward


def shards_inside(layer: nn.Module) -> bool:
    """Whether FSDP shards a part of a layer by itself, as it does with experts that several ranks hold. Its hooks cut
    the layer's graph; PyTorch's checkpoint refuses what they cut at another place when it is computed again
    (`COMPILED_AGAIN`)."""
    return any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer)


def _inside_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward without the checkpoint that `GradientCheckpointingLayer` puts around it."""
    while getattr(getattr(function, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        function = cast(Any, function).__wrapped__
    return function


def check_backend(name: str) -> None:
    """Raise ValueError if `torch.compile` does not know this backend."""
    if name != "inductor" and name not in torch.compiler.list_backends(()):  # which imports them all
        usual = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"torch.compile has no backend {name!r} here; those for users are {usual}")


def eagerly() -> AbstractContextManager[object]:
    """Inside, what was compiled runs as it was written."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


# ---------------------------------------------------------------------------------------------------------------------
# What decoder layers save for the backward: recomputed there (gradient checkpointing), or in host memory meanwhile.
#
# PyTorch's checkpoints note the state of random numbers before each region; during a capture that is an offset inside
# of the graph. It means nothing to another graph, such as that of a backward alone. So layers note it only where
# something is random (`draws_random_numbers`).

# In names of numbers that modules have: probabilities, or widths of noise.
RANDOM = ("dropout", "jitter")
_ATTRIBUTE = "_carpool_offload"


def recompute_layers(model: Any, ride_again: bool) -> None:
    """From now on, decoder layers keep their input alone, and compute everything else a second time in the backward.

    Args:
        ride_again: whether rides and experts are computed again, too (`carpool.activations.whole_layers`).
    """
    notes = draws_random_numbers(model)
    around = partial(_around, ride_again)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": notes, "context_fn": around})


def _around(ride_again: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a layer's forward runs in, and what it runs in again."""
    first, again = (nullcontext(), nullcontext()) if ride_again else keep_rides()
    return first, found_again(again)


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a forward in training depends on random numbers: drop-out, noise in routers, choices dropped at
    random."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and any(word in name for word in RANDOM):
                return True
    return any(own.drops is not None and own.drops.random_second for own in rides(model).values())


def offload_layers(model: nn.Module) -> ActivationOffload:
    """From now on, what autograd saves inside each decoder layer goes to host memory beside the computation, and comes
    back ahead of the layer's backward (carpool/activations/whole_layers.py). The same bits. Rides have policies of
    their own (`set_activation_policies`). Layers are compiled before, and without gradient checkpointing.

    Raises:
        ValueError: layers cannot be found."""
    offload = ActivationOffload()
    for layer in decoder_layers(model):
        # Of a stage of a pipeline, layers of other stages have nothing.
        if not any(True for _ in layer.parameters()):
            continue
        layer.forward = _offloaded(layer, layer.forward, offload)
    object.__setattr__(model, _ATTRIBUTE, offload)
    return offload


def offloaders(model: nn.Module) -> list[Offloader]:
    """What keeps activations of a model in host memory: of its layers, and of its rides. Each once."""
    found = [own.offloader for own in rides(model).values() if own.offloader is not None]
    of_layers: ActivationOffload | None = getattr(model, _ATTRIBUTE, None)
    if of_layers is not None:
        found.append(of_layers.offloader)
    return list({id(one): one for one in found}.values())


def _offloaded(layer: nn.Module, own: Callable[..., Any], offload: ActivationOffload) -> Callable[..., Any]:
    device = next(layer.parameters()).device

    def forward(*args: Any, **kwargs: Any) -> Any:
        with offload.layer(device, half_number()):
            return own(*args, **kwargs)

    return forward
