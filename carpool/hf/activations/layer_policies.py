"""What the decoder layers of a model save for the backward: computed again there (gradient checkpointing), or in host
memory meanwhile.

PyTorch's checkpoints note the state of random numbers before each region, so that drop-out drops the same the second
time. That state lies on the host, and a CUDA graph cannot ask for it. Most MoE models draw nothing at random, so layers
note it only where something does (`draws_random_numbers`); all others can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from carpool.activations.layer_offload import ActivationOffload
from carpool.activations.offload import Offloader
from carpool.activations.recompute import keep_rides
from carpool.hf.seam.layers import decoder_layers
from carpool.hf.seam.padding import found_again
from carpool.hf.seam.rides import rides
from carpool.ride.turns import half_number

# In names of numbers that modules have: probabilities, or widths of noise.
RANDOM = ("dropout", "jitter")
_ATTRIBUTE = "_carpool_offload"


def recompute_layers(model: Any, ride_again: bool) -> None:
    """From now on, decoder layers keep their input alone, and compute everything else a second time in the backward.

    Args:
        model: of transformers.
        ride_again: whether rides and experts are computed again, too (`carpool.activations.recompute`).
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
    back ahead of the layer's backward (carpool/activations/layer_offload.py). The same bits. What rides keep has
    policies of its own (`set_kept`).

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
