"""Hooks of gradients: called, and no owner's life is theirs."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from carpool.parallel.replicated import on_gradient


class Owner:
    """Holds a parameter, which has a hook that calls it."""

    def __init__(self) -> None:
        # A view, as parameters of flat buffers are.
        self.parameter = nn.Parameter(torch.zeros(8).view(2, 4))
        self.came: list[int] = []
        on_gradient(self.parameter, self.take, 7)

    def take(self, number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.came.append(number)


def test_a_hook_is_called_and_keeps_nothing() -> None:
    owner = Owner()
    for _ in range(2):
        owner.parameter.sum().backward()
    assert owner.came == [7, 7]
    held = weakref.ref(owner)
    del owner
    gc.collect()
    assert held() is None
