"""Moments of a CUDA graph, which a kernel notes. An event would split the graph: with some 400 of them in flight a
launch waits until the graph before is done (docs/measurements.md, "Launches of graphs that wait").

    begin, end = stamp(device), stamp(device)        in a capture, around what is timed
    begin.elapsed_time(end)                          as of events, of the latest replay; waits for it

Stamps of a device share a tensor, of which each has an element until nobody holds it. It is copied to the host at most
once between two launches of graphs, for all stamps together.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from carpool.kernels.signals import nanoseconds

MOST = 1 << 16


@triton.jit(do_not_specialize=["where"])
def _note(moments_N, where):  # type: ignore[no-untyped-def]
    tl.store(moments_N + where, nanoseconds())


class _Moments:
    """Of one device. It is made, and its kernel is compiled, outside of any capture."""

    def __init__(self, device: torch.device) -> None:
        self.there_N = torch.zeros(MOST, dtype=torch.int64, device=device)
        self.here_N = torch.zeros(MOST, dtype=torch.int64, pin_memory=True)
        # An element of it is read twenty times as fast as one of the tensor, and a step reads hundreds.
        self.numbers = self.here_N.numpy()
        self.free = list(reversed(range(MOST)))
        self.copied_at = -1
        self.note(0)

    def note(self, where: int) -> None:
        _note[(1,)](self.there_N, where, num_warps=1)

    def read(self, where: int) -> int:
        if self.copied_at != launches.number:
            self.here_N.copy_(self.there_N, non_blocking=True)
            torch.cuda.current_stream(self.there_N.device).synchronize()
            self.copied_at = launches.number
        return int(self.numbers[where])


class _Launches:
    """How many graphs this process has launched."""

    number = 0


launches = _Launches()


@cache
def moments(device: torch.device) -> _Moments:
    """Those of a device. The first call must not be in a capture."""
    return _Moments(device)


class Stamp:
    """The moment at which the device came here, in each replay of the graph that is being captured."""

    def __init__(self, device: torch.device) -> None:
        self._moments = moments(device)
        self._where = self._moments.free.pop()
        self._moments.note(self._where)

    def __del__(self) -> None:
        self._moments.free.append(self._where)

    def synchronize(self) -> None:
        """Wait for it, as for an event."""
        self._moments.read(self._where)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until `end`."""
        return (self._moments.read(end._where) - self._moments.read(self._where)) / 1e6
