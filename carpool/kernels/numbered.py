"""Objects with a number, for operators that are given numbers and not objects: see carpool/ride/operator.py.

A number is a tensor on the CPU. A compiled graph takes a tensor as an input, whatever its value, so the layers of a
model share one graph; an integer would be a constant of the graph, and each layer would be compiled anew, up to the
compiler's limit of 8.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

# A number means the same object for as long as that lives, everywhere in the process.
_ALIVE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Numbered:
    """Base class: every instance has a `number` of its own, () int64, from its construction on."""

    number: torch.Tensor

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        number = next(_numbers)
        # Frozen dataclasses have numbers, too.
        object.__setattr__(made, "number", torch.tensor(number, device="cpu"))
        _ALIVE[number] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy is made by `__new__` too, and keeps the number that it got there."""
        return {name: value for name, value in self.__dict__.items() if name != "number"}


def by_number(number: torch.Tensor) -> Any:
    """The object with this number.

    Raises:
        RuntimeError: it is gone, so whatever was compiled for it is out of date."""
    found = _ALIVE.get(int(number))
    if found is None:
        raise RuntimeError(
            "a compiled ride ran after its setup (transport, experts, schedule) had been replaced or its layer freed"
        )
    return found
