"""Deliberate mistakes, which the comparisons of a parity matrix must notice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function becomes a context inside of which it stands for `owner.name`, with that one as its first
    argument, and then with what the context was entered with.

        @instead_of(math, "sqrt")
        def sqrt_of_half(right, x):
            return right(x / 2)
    """

    def make(wrong: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wrong)
        @contextmanager
        def mistake(*given: Any) -> Iterator[None]:
            right = getattr(owner, name)
            with mock.patch.object(owner, name, lambda *args, **kwargs: wrong(right, *given, *args, **kwargs)):
                yield

        return mistake

    return make
