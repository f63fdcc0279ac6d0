"""How a section is timed: all ranks start together, the slowest rank counts, and nobody is timed alone.

On CUDA, before each timed section, the ranks meet on the host (a barrier, and the device has nothing left to do), then
each queues a delay kernel (a millisecond, unless a benchmark says otherwise) and a tiny all-reduce, then the first
event, the section, the second event. While the delay runs the host queues the section, so that launching is hidden, as
it is in training, where the host runs ahead; the all-reduce lets the devices start together however unequal the hosts
were. The delay is the same for all contenders. Whoever has to ask the device something waits for the delay, and what it
queues after that is not hidden: it pays for this in its own time, as it does in training. How long the host took is
kept as well (`host_us`): a contender whose host needs longer than the delay is timed with the rest of it.

On CPU: a barrier, and the clock.

A repetition's time is that of the slowest rank; the median and the 99th percentile are over repetitions (the largest,
if there are fewer than 100).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

DELAY_CYCLES = 2_000_000  # about a millisecond at 2 GHz: a slow host takes 500 us to launch a plan and a dispatch

K = TypeVar("K")
T = TypeVar("T")


def rounds(contenders: Collection[T], repetitions: int, warmup: int) -> Iterator[tuple[int, list[T]]]:
    """The number of each round and the order of the contenders in it, which turns about. Below 0 is warming up.

    Who leaves `contenders` meanwhile is not in the next round.

    Example: rounds("ab", repetitions=2, warmup=1)  ->  (-1, [a, b]), (0, [b, a]), (1, [a, b])
    """
    for number in range(-warmup, repetitions):
        order = list(contenders)
        yield number, order if number % 2 else order[::-1]


def in_turns(contenders: Mapping[K, Callable[[], T]], repetitions: int, warmup: int = 0) -> dict[K, list[T]]:
    """What each contender returned in each repetition; they take turns (`rounds`)."""
    found: dict[K, list[T]] = {name: [] for name in contenders}
    for number, order in rounds(contenders, repetitions, warmup):
        for name in order:
            one = contenders[name]()
            if number >= 0:
                found[name].append(one)
    return found


def begin_together(
    device: torch.device, group: dist.ProcessGroup | None, delay_cycles: int, flag: torch.Tensor | None = None
) -> None:
    """All ranks begin at the same time, on the device too, and the host is ahead by the delay.

    Args:
        flag: one number on the device, for the all-reduce; made if it is missing.
    """
    if group is not None:
        dist.barrier(group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(delay_cycles)
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device) if flag is None else flag, group=group)


# What waits for the device, of PyTorch's Python interface.
_WAITS = (
    (torch.Tensor, "item"), (torch.Tensor, "tolist"), (torch.Tensor, "cpu"), (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"),
)  # fmt: skip


class HostTimes(NamedTuple):
    """Seconds of each call that waits for the device, and of each launch of a CUDA graph (in a drained step with the
    time until the device has done it, which also counts as waiting)."""

    waits: list[float]
    launches: list[float]


@contextmanager
def host_times(drained: bool = False) -> Iterator[HostTimes]:
    """Inside, the seconds of such calls are appended. For the whole process; what waits inside of an operator
    (`nonzero`) is not seen.

    Args:
        drained: after each launch of a CUDA graph the host waits until the device has done it. Otherwise launches,
            also those of kernels, return late where much is under way, which looks like work."""
    seconds = HostTimes([], [])
    replay = torch.cuda.CUDAGraph.replay

    def replay_drained(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        torch.cuda.current_stream().synchronize()

    def timed(original: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                into.append(time.perf_counter() - begin)

        return call

    originals: list[tuple[Any, str, Any, list[float]]] = [
        (owner, name, getattr(owner, name), seconds.waits) for owner, name in _WAITS
    ]
    originals.append((torch.cuda.CUDAGraph, "replay", replay, seconds.launches))
    for owner, name, original, into in originals:
        setattr(owner, name, timed(replay_drained if drained and original is replay else original, into))
    try:
        yield seconds
    finally:
        for owner, name, original, _ in originals:
            setattr(owner, name, original)


def medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class Clock:
    """Times of named sections on this rank.

    Args:
        group: the ranks that work together; None for one.
        delay_cycles: how long the device is kept busy before a section, while the host launches it.

    Attributes:
        keep: whether what is timed now counts; False while warming up.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, delay_cycles: int = DELAY_CYCLES) -> None:
        self.device, self.group, self.delay_cycles = device, group, delay_cycles
        self.keep = True
        self._flag = torch.zeros(1, device=device)
        self._sections: dict[tuple[str, str], list[Any]] = {}
        self._host: dict[tuple[str, str], list[float]] = {}

    @contextmanager
    def section(self, label: str, name: str) -> Iterator[None]:
        """Time the enclosed work, once all ranks have come here. All enter the same sections in the same order."""
        begin_together(self.device, self.group, self.delay_cycles, self._flag)
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            host = time.perf_counter()
            yield
            host = time.perf_counter() - host
            end.record()
            span: Any = (begin, end)
        else:
            start = time.perf_counter()
            yield
            span = host = time.perf_counter() - start
        if self.keep:
            self._sections.setdefault((label, name), []).append(span)
            self._host.setdefault((label, name), []).append(1e6 * host)

    def slowest(self) -> dict[tuple[str, str], list[float]]:
        """Microseconds of the slowest rank in each repetition, by (label, section). Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        own = {
            key: [1e3 * s[0].elapsed_time(s[1]) if isinstance(s, tuple) else 1e6 * s for s in spans]
            for key, spans in self._sections.items()
        }
        flat = torch.tensor([us for times in own.values() for us in times], dtype=torch.float64, device=self.device)
        if self.group is not None and flat.numel():
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self.group)
        everyone = iter(flat.tolist())
        return {key: [next(everyone) for _ in times] for key, times in own.items()}

    def host_us(self, label: str, name: str) -> float:
        """Median microseconds that this rank's host spent in a section."""
        return statistics.median(self._host[label, name])


def p99(times: Sequence[float]) -> float:
    """The 99th percentile; of fewer than 100 values, the largest."""
    return percentile(times, 99) if len(times) >= 100 else max(times)


def percentile(times: Sequence[float], percent: int) -> float:
    """Between the two nearest values, in proportion: `percentile([1.0, 2.0], 10) == 1.1`."""
    return float(np.percentile(times, percent))
