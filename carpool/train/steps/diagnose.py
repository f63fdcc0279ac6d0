"""What is done where equal runs are to be bitwise equal, and where a number that is no number came from.

Carpool's own kernels add in a fixed order, always. PyTorch's do not all: the backward of fused attention adds what
blocks of keys contribute to a query in the order in which they finish, and two equal runs differ from the second step
on. PyTorch has deterministic algorithms for that, which are slower (`determinism`).

A loss that is NaN or infinite says nothing about its cause. So the forward runs once more on the same batch with a
hook on every module, and the first one whose output is not finite is named; if the forward is clean, the parameters
whose gradients are not finite are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.parallel.ranks import gather
from carpool.parallel.replicated import sharded_parameters


@contextmanager
def determinism(on: bool) -> Iterator[None]:
    """Inside, PyTorch uses deterministic algorithms, and raises RuntimeError where it has none."""
    if not on:
        yield
        return
    # A module whose attributes are made on first use.
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would find code that reads what nobody wrote, at the cost of writing every buffer.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


class WrongStepError(ArithmeticError):
    """A step that must not count: its loss is not to be believed."""


class NonFiniteError(WrongStepError):
    """Training cannot go on: a loss or a gradient is NaN or infinite. The message says where it began."""


@torch.no_grad()
def first_nonfinite_module(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Run `forward` and name the first module, in order of execution, with a non-finite output on any rank.

    All ranks call it together. Containers finish after what they contain, so the name is as deep as it gets.
    """
    found: list[str] = []
    handles = []
    for name, module in model.named_modules():

        def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(first, torch.Tensor) and first.is_floating_point() and _bad(first):
                found.append(name or type(_module).__name__)

        handles.append(module.register_forward_hook(hook))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    order = [name for name, _ in model.named_modules()]
    return min(chain(*gather(found)), key=lambda name: order.index(name) if name in order else -1, default=None)


@torch.no_grad()
def nonfinite_parameters(model: nn.Module, gradients: bool) -> list[str]:
    """Names of parameters (or of those whose gradients) hold a non-finite number on any rank."""
    found = []
    with sharded_parameters(model):
        for name, parameter in model.named_parameters():
            value = parameter.grad if gradients else parameter
            if value is not None and _bad(value):
                found.append(name)
    names = set(chain(*gather(found)))
    return [name for name, _ in model.named_parameters() if name in names]


def explain(model: nn.Module, forward: Callable[[], Any]) -> str:
    """One sentence about where non-finite numbers are. All ranks call it together, before the optimizer's step."""
    if weights := nonfinite_parameters(model, gradients=False):
        return f"the weights of {_some(weights)} are not finite"
    if module := first_nonfinite_module(model, forward):
        return f"the first output that is not finite is that of {module}"
    if gradients := nonfinite_parameters(model, gradients=True):
        return f"the forward is finite, but the gradients of {_some(gradients)} are not"
    return "a second forward on the same batch is finite on all ranks"


def _bad(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not bool(torch.isfinite(local).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
