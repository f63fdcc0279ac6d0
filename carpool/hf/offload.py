"""Activations of the decoder layers of a model in host memory, between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from carpool.hf.compiled import decoder_layers
from carpool.memory.activations import ActivationOffload
from carpool.ride.turns import half_number


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
    return offload


def _offloaded(layer: nn.Module, own: Callable[..., Any], offload: ActivationOffload) -> Callable[..., Any]:
    device = next(layer.parameters()).device

    def forward(*args: Any, **kwargs: Any) -> Any:
        with offload.layer(device, half_number()):
            return own(*args, **kwargs)

    return forward
