"""Two threads that take turns: what one does between two hand-overs, nobody else does meanwhile.

    half 0    attention  dispatch |              | experts  combine |
    half 1                        | attention .. |                  | experts ..          | handover()

So the host enqueues the work of both halves in one fixed order: collectives start in the same order on all ranks,
gradients are added in the same order in every run, and no state of the model is touched by two threads at a time.

A thread gives its turn to the other and waits, with two locks that are otherwise closed. Each half has random numbers
of its own: its generators' states come back with its turn. A checkpointed layer with drop-out would otherwise drop
something else when it is computed again, and its gradients would be wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import NamedTuple, TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


class AbandonedError(RuntimeError):
    """The other half has failed; its error is the one to look at."""


class Turns:
    """The turns of one run. Half 0 has the first.

    Args:
        device: whose random numbers each half has for itself, besides the CPU's.
        resume: is called with the number of a half that has the turn again, for what else it has for itself.
        draws: whether the halves may draw random numbers. While a CUDA graph is captured they may not: a generator's
            state is the graph's then.
    """

    def __init__(
        self, device: torch.device, resume: Callable[[int], None] = lambda half: None, draws: bool = True
    ) -> None:
        self.device, self.resume, self.draws = device, resume, draws
        self._closed = threading.Lock(), threading.Lock()
        for lock in self._closed:
            lock.acquire()
        # Waits for the other at the end of a phase, or has nothing to do any more.
        self._idle = [False, False]
        self._failed = False

    def hand_over(self, half: int) -> None:
        """Called by `half` in its turn; returns in its next one."""
        if not self._idle[1 - half]:
            self._give_turn(half)

    def meet(self, half: int) -> None:
        """The end of a phase: neither half goes on before both have come here; half 0 goes on first."""
        if not self._idle[1 - half]:
            self._idle[half] = True
            self._give_turn(half)
            return
        self._idle = [False, False]
        if half == 1:
            self._give_turn(half)

    def begin(self, half: int) -> None:
        """Returns in the first turn of `half`."""
        if half == 1:
            self._wait(half)

    def end(self, half: int) -> None:
        """`half` has nothing more to do. For half 0 it returns when half 1 has ended too."""
        if half == 1:
            self._idle[half] = True
            self._closed[0].release()
        elif not self._idle[1]:
            self._idle[half] = True
            self._give_turn(half)

    def fail(self, half: int) -> None:
        """`half` has failed: the other will, too, when it next comes to hand over."""
        self._failed = True
        self._closed[1 - half].release()

    def _give_turn(self, half: int) -> None:
        cpu = torch.get_rng_state() if self.draws else None
        own = torch.cuda.get_rng_state(self.device) if self.draws and self.device.type == "cuda" else None
        self._closed[1 - half].release()
        self._wait(half)
        if cpu is not None:
            torch.set_rng_state(cpu)
        if own is not None:
            torch.cuda.set_rng_state(own, self.device)

    def _wait(self, half: int) -> None:
        self._closed[half].acquire()
        if self._failed:
            raise AbandonedError(f"half {half} of two was abandoned, because the other has failed")
        self.resume(half)


class Half(NamedTuple):
    """Which half of which run a thread computes."""

    turns: Turns
    number: int


# Of a thread, as a context is.
HALF: ContextVar[Half | None] = ContextVar("carpool_half", default=None)


def half_number() -> int:
    """The half that this thread computes; 0 if there are no halves."""
    half = HALF.get()
    return 0 if half is None else half.number


def handover() -> None:
    """Something is under way that takes a while: let the other half compute meanwhile. Does nothing unless this thread
    computes one of two halves (`carpool.ride.two_batch`)."""
    half = HALF.get()
    if half is not None:
        half.turns.hand_over(half.number)


class TwoThreads:
    """The caller's thread and one more, which it keeps: the first of two pieces of work runs in the caller's.

    What the caller has set is set for both: context variables, autocast, the device and its stream."""

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
