"""Activations of the decoder layers of a model in host memory, between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from carpool.hf.seam.layers import decoder_layers
from carpool.hf.seam.rides import rides
from carpool.memory.activations import ActivationOffload
from carpool.memory.offload import Offloader
from carpool.ride.turns import half_number

_ATTRIBUTE = "_carpool_offload"


def offload_layers(model: nn.Module) -> ActivationOffload:
    """From now on, what autograd saves inside each decoder layer goes to host memory beside the computation, and comes
    back ahead of the layer's backward (carpool/memory/activations.py). The same bits. What rides keep has policies of
    its own (`set_kept`).

    Layers that are to be compiled are compiled before. Without gradient checkpointing, which keeps nothing of a layer.

    Raises:
        ValueError: layers that cannot be found."""
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
