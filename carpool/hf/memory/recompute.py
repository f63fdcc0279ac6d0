"""Decoder layers of a model that are computed again in the backward (gradient checkpointing).

PyTorch's checkpoints note the state of random numbers before each region, so that drop-out drops the same the second
time. That state lies on the host, and a CUDA graph cannot ask for it. Most MoE models draw nothing at random, so layers
note it only where something does (`draws_random_numbers`); all others can be captured.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from carpool.hf.seam.padding import found_again
from carpool.hf.seam.rides import rides
from carpool.memory.recompute import keep_rides

# In names of numbers that modules have: probabilities, or widths of noise.
RANDOM = ("dropout", "jitter")


def recompute_layers(model: Any, ride_again: bool) -> None:
    """From now on, decoder layers keep their input alone, and compute everything else a second time in the backward.

    Args:
        model: of transformers.
        ride_again: whether rides and experts are computed again, too (`carpool.memory.recompute`).
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
