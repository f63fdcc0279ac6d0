"""Whether a forward is the second one of activation checkpointing, and counting that leaves the second one out."""

from __future__ import annotations

import torch


def in_recompute() -> bool:
    """Whether this forward is the second one of activation checkpointing.

    Both kinds of checkpointing (reentrant or not) recompute inside the backward pass, where autograd has a graph
    task under way. Counting tokens there again is a known bug of load statistics.
    """
    return torch._C._current_graph_task_id() != -1


def new_counter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that every later forward can add to: what is made in inference mode cannot be changed outside of it."""
    if not torch.is_inference_mode_enabled():
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def add_once(counter: torch.Tensor, amount: torch.Tensor) -> None:
    """`counter += amount`, unless this forward is computed again. Compiled, the graph asks each time that it runs."""
    if torch.compiler.is_compiling():
        counter += amount * _is_first(counter)
    elif not in_recompute():
        counter += amount


@torch.library.custom_op("carpool::is_first_forward", mutates_args=())
def _is_first(like: torch.Tensor) -> torch.Tensor:
    """() int64 on the device of `like`: 0 if this forward is computed again, else 1."""
    return torch.full((), 0 if in_recompute() else 1, dtype=torch.int64, device=like.device)


@_is_first.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)
