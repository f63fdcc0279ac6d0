"""Two pieces of work that take turns (`carpool.ride.turns`): the first in the caller's thread, the second in another.

What the caller has set is set for both: context variables, autocast, the device and its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import TypeVar

import torch

from carpool.ride.turns import HALF, AbandonedError, Half, Turns

First = TypeVar("First")
Second = TypeVar("Second")


class TwoThreads:
    """The caller's thread and one more, which it keeps."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool-half-1")

    def run(self, turns: Turns, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """What the two return.

        Raises:
            The error of the one that failed first, if one does; the other has then been abandoned."""
        inherit = _thread_state(turns.device)

        def beside() -> Second:
            with inherit():
                return _run(Half(turns, 1), second)

        other = self._thread.submit(copy_context().run, beside)
        try:
            result = _run(Half(turns, 0), first)
        except AbandonedError:
            other.result()
            raise
        finally:
            wait([other])
        return result, other.result()


def _run(half: Half, work: Callable[[], First]) -> First:
    turns, number = half
    token = HALF.set(half)
    try:
        turns.begin(number)
        result = work()
        turns.end(number)
        return result
    except BaseException:
        turns.fail(number)
        raise
    finally:
        HALF.reset(token)


def _thread_state(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What this thread has set, for another: autocast, and the device's stream."""
    on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def inherit() -> Iterator[None]:
        if stream is not None:
            # A thread begins on device 0, and leaving the stream's context would go back there.
            torch.cuda.set_device(device)
        with torch.autocast(device.type, dtype) if on else nullcontext(), torch.cuda.stream(stream):
            yield

    return inherit
