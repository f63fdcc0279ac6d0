"""Time stamps inside a CUDA graph, written by a kernel. An event would split the graph: with some 400 events in flight
a launch waits until the previous graph has finished (docs/measurements.md, "Launches of graphs that wait").

    begin, end = Stamp(device), Stamp(device)        in a capture, before and after the timed kernels
    begin.elapsed_time(end)                          like that of events, for the latest replay; waits for it

The stamps of a device share a tensor. Each stamp holds one element of it until it is deleted. All elements together are
copied to the host, at most once between two launches of graphs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from carpool.kernels.graph_launches import launches
from carpool.kernels.signals import nanoseconds

MAX_STAMPS = 1 << 16


@triton.jit(do_not_specialize=["index"])
def _store_time(times_N, index):  # type: ignore[no-untyped-def]
    tl.store(times_N + index, nanoseconds())


class _StampBuffer:
    """The stamps of one device. Its construction, which compiles the kernel, must not be in a capture."""

    def __init__(self, device: torch.device) -> None:
        self.device_N = torch.zeros(MAX_STAMPS, dtype=torch.int64, device=device)
        self.host_N = torch.zeros(MAX_STAMPS, dtype=torch.int64, pin_memory=True)
        # An element of the NumPy array is read 20 times as fast as one of the tensor, and a step reads hundreds.
        self.numbers = self.host_N.numpy()
        self.free = list(reversed(range(MAX_STAMPS)))
        self.stream, self.copied = torch.cuda.Stream(device), torch.cuda.Event()
        self.copied_at = -1
        self.store(0)

    def store(self, index: int) -> None:
        _store_time[(1,)](self.device_N, index, num_warps=1)

    def read(self, index: int) -> int:
        if self.copied_at != launches.number:
            # Beside what was launched after the graphs, a gradient's norm for example, which nobody waits for here.
            for end in launches.ends.values():
                self.stream.wait_event(end)
            with torch.cuda.stream(self.stream):
                self.host_N.copy_(self.device_N, non_blocking=True)
                self.copied.record()
            self.copied.synchronize()
            self.copied_at = launches.number
        return int(self.numbers[index])


@cache
def stamp_buffer(device: torch.device) -> _StampBuffer:
    """The buffer of a device. The first call must not be in a capture."""
    return _StampBuffer(device)


class Stamp:
    """The time at which the device reaches this point of the captured graph, in each replay."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = stamp_buffer(device)
        self._index = self._buffer.free.pop()
        self._buffer.store(self._index)

    def __del__(self) -> None:
        self._buffer.free.append(self._index)

    def synchronize(self) -> None:
        """Wait until the stamp is written, as `synchronize` of an event does."""
        self._buffer.read(self._index)

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until `end`."""
        return (self._buffer.read(end._index) - self._buffer.read(self._index)) / 1e6
