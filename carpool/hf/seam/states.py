"""Whether states of a model are as everybody else has them, or as they lie in this run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_AS_THEY_LIE: ContextVar[bool] = ContextVar("carpool_as_they_lie", default=False)


@contextmanager
def as_they_lie() -> Iterator[None]:
    """Inside, `state_dict()` and `load_state_dict()` of a model take experts, and their adapters, as they lie.

    Outside, experts that have moved are in logical order, so that `save_pretrained` writes what any process reads, and
    adapters of experts are in peft's layout. Both are then collective: `state_dict()` is a copy, whose rows travel."""
    token = _AS_THEY_LIE.set(True)
    try:
        yield
    finally:
        _AS_THEY_LIE.reset(token)


def states_lie() -> bool:
    """Whether this is inside `as_they_lie`."""
    return _AS_THEY_LIE.get()
