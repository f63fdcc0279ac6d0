"""Weight gradients as work of their own, for schedules of pipelines that split a backward in two (zero bubble, Qi et
al., arXiv 2401.10241).

Another stage waits for the gradients of a backward's inputs. Nobody waits for those of weights before the step ends, so
they fill the time in which a rank would wait for others:

    backward               gradients of rows, routing weights, hidden states; what is owed to weights is put here
    weights = owed.take()  what this backward has put
    weights()              computes it, and gives it to the parameters as autograd would: hooks of gradients are called

A node that puts something here has the weights as they are after casts, slots and shards, and no edge to them: the edge
is walked by `weights()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Tensors = Sequence[torch.Tensor | None]


class _Item(NamedTuple):
    weights: Tensors
    compute: Callable[[], Tensors]


class Owed:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def put(self, weights: Tensors, compute: Callable[[], Tensors]) -> None:
        """In a backward. `compute` returns the gradient of each of `weights`, or None; it holds what it needs."""
        self._items.append(_Item(weights, compute))

    def take(self) -> Callable[[], None]:
        """What computes all that has been put since the last call, once."""
        items, self._items = self._items, []

        def compute() -> None:
            # From the front, as the backward did, and each let go when it is done.
            items.reverse()
            while items:
                weights, gradients = items.pop()
                with torch.no_grad():
                    found = gradients()
                pairs = zip(weights, found, strict=True)
                given = [(w, g) for w, g in pairs if w is not None and g is not None and w.requires_grad]
                if given:
                    torch.autograd.backward([w for w, _ in given], [g for _, g in given])

        return compute
