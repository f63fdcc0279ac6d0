"""Two threads that take turns: only one of them runs between two hand-overs.

    half 0    attention  dispatch |              | experts  combine |
    half 1                        | attention .. |                  | experts ..          | handover()

So the host enqueues the work of both halves in one fixed order: collectives start in the same order on all ranks,
gradients are added in the same order in every run, and no two threads access the model's state at the same time.

A thread passes its turn to the other and waits; two locks implement this. Each half has its own random numbers: the
states of the generators are restored with its turn. Otherwise a checkpointed layer with drop-out would drop other
elements in its recomputation, and its gradients would be wrong.
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
    """The other half has failed; its error is the cause."""


class Turns:
    """The turns of one run. Half 0 has the first.

    Args:
        device: of the generator whose state each half has for itself, besides the CPU's.
        resume: called with the number of a half that gets the turn, to restore further state of that half.
    """

    def __init__(self, device: torch.device, resume: Callable[[int], None] = lambda half: None) -> None:
        self.device, self.resume = device, resume
        self._closed = threading.Lock(), threading.Lock()
        for lock in self._closed:
            lock.acquire()
        # For each half: waiting at the end of a phase, or finished.
        self._idle = [False, False]
        self._failed = False

    def hand_over(self, half: int) -> None:
        """Pass the turn of `half` to the other one; returns in its next turn."""
        if not self._idle[1 - half]:
            self._give_turn(half)

    def meet(self, half: int) -> None:
        """A barrier at the end of a phase, after which half 0 continues first."""
        if not self._idle[1 - half]:
            self._idle[half] = True
            self._give_turn(half)
            return
        self._idle = [False, False]
        if half == 1:
            self._give_turn(half)

    def begin(self, half: int) -> None:
        """Wait for the first turn of `half`."""
        if half == 1:
            self._wait(half)

    def end(self, half: int) -> None:
        """Mark `half` as finished. For half 0, returns when half 1 has finished too."""
        if half == 1:
            self._idle[half] = True
            self._closed[0].release()
        elif not self._idle[1]:
            self._idle[half] = True
            self._give_turn(half)

    def fail(self, half: int) -> None:
        """Mark `half` as failed: the other one raises at its next hand-over."""
        self._failed = True
        self._closed[1 - half].release()

    def _give_turn(self, half: int) -> None:
        cpu = torch.get_rng_state()
        # During a capture: the offset inside of the graph, which PyTorch allows to set.
        own = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._closed[1 - half].release()
        self._wait(half)
        torch.set_rng_state(cpu)
        if own is not None:
            torch.cuda.set_rng_state(own, self.device)

    def _wait(self, half: int) -> None:
        self._closed[half].acquire()
        if self._failed:
            raise AbandonedError(f"half {half} of two was abandoned, because the other has failed")
        self.resume(half)


class Half(NamedTuple):
    """The run and the half that a thread computes."""

    turns: Turns
    number: int


# Of the current thread, because contexts are per thread.
HALF: ContextVar[Half | None] = ContextVar("carpool_half", default=None)


def half_number() -> int:
    """The number of the half that this thread computes; 0 if there are no halves."""
    half = HALF.get()
    return 0 if half is None else half.number


def handover() -> None:
    """Something is under way that takes a while: let the other half compute meanwhile. Does nothing unless this thread
    computes one of two halves (`carpool.ride.two_batch`)."""
    half = HALF.get()
    if half is not None:
        half.turns.hand_over(half.number)


class TwoThreads:
    """Runs two functions in the caller's thread and in a persistent second thread.

    The second thread inherits context variables, autocast, the device and its stream."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool-half-1")

    def run(self, turns: Turns, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Run both, and return their results.

        Raises:
            The error of the one that failed first; the other one is then abandoned."""
        inherit = _thread_state(turns.device)

        def in_thread() -> Second:
            with inherit():
                return _run(Half(turns, 1), second)

        other = self._thread.submit(copy_context().run, in_thread)
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
    """A context that sets this thread's autocast and stream in another thread."""
    on, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def inherit() -> Iterator[None]:
        if stream is not None:
            # A new thread is on device 0, to which leaving the stream's context would return.
            torch.cuda.set_device(device)
        with torch.autocast(device.type, dtype) if on else nullcontext(), torch.cuda.stream(stream):
            yield

    return inherit
