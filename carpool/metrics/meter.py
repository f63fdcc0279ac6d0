"""Milliseconds of the verbs of a layer's rides, also shown to profilers.

Times are a pair of events (CUDA) or clock readings (CPU) around each verb. Nothing here synchronises with the device
until somebody asks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

# Nsight sets one of them for the programs that it starts.
NSIGHT = any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"))


def in_recompute() -> bool:
    """Whether this forward is the second one of activation checkpointing.

    Both kinds of checkpointing (reentrant or not) recompute inside the backward pass, where autograd has a graph
    task under way. Counting tokens there again is a known bug of load statistics.
    """
    return torch._C._current_graph_task_id() != -1


def range_name(layer: str, direction: str, piece: str, chunk: int | None = None) -> str:
    """What profilers show: ("layers.3", "forward", "dispatch", 1) -> "carpool::layers.3::forward::dispatch::1".

    `carpool.profile` reads such names in traces."""
    return "::".join(["carpool", layer, direction, piece, *([] if chunk is None else [str(chunk)])])


def watched() -> bool:
    """Whether a profiler sees ranges. One costs 40 us, and a layer has six."""
    # This flag is the process's: a thread's own (`torch.autograd._profiler_enabled`) says no in a thread that was there
    # before the profiler.
    return torch.autograd.profiler._is_profiler_enabled or NSIGHT


def shown(name: str) -> AbstractContextManager[Any]:
    """A range that profilers see around the enclosed work."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return torch.cuda.nvtx.range(name) if NSIGHT else nullcontext()


# Calls whose times are kept: nobody may ever ask, and a run has millions.
KEPT_SPANS = 1024
# By name: calls, each in pieces.
Spans = dict[str, deque[list[Any]]]


class Meter:
    """Milliseconds of the latest calls of each named span, also shown to profilers.

    PyTorch's profiler sees them as `record_function` ranges, which are NVTX ranges under `emit_nvtx` (and `nsys profile
    --pytorch=autograd-nvtx`); Nsight alone sees NVTX ranges.

    Attributes:
        layer: what profilers call the layer; whoever knows its name sets it.
    """

    def __init__(self, layer: str = "moe") -> None:
        self.layer = layer
        self._spans: Spans = {}

    def ride(self, device: torch.device, direction: str, chunks: int = 1) -> RideSpans:
        """The spans of one ride, in chunks."""
        return RideSpans(self, device, direction, chunks)

    def named(self, name: str, direction: str, chunk: int | None = None) -> AbstractContextManager[Any]:
        """A range that profilers see around the enclosed work, without timing it."""
        if not watched():
            return nullcontext()
        if direction == "forward" and in_recompute():
            direction = "recompute"
        return shown(range_name(self.layer, direction, name, chunk))

    @contextmanager
    def span(self, name: str, device: torch.device, direction: str = "forward") -> Iterator[None]:
        """Time the enclosed work on `device`: by events in the current stream on CUDA, by the clock elsewhere.
        `direction`: for profilers."""
        spans = self.ride(device, direction)
        spans.begin(name)
        yield
        spans.end()

    def call(self, name: str) -> list[Any]:
        """The pieces of a new call of a span, to be appended to."""
        pieces: list[Any] = []
        self._spans.setdefault(name, deque(maxlen=KEPT_SPANS)).append(pieces)
        return pieces

    def exchange(self, spans: Spans) -> Spans:
        """Put `spans` in the place of those since the last reset, which are returned."""
        before, self._spans = self._spans, spans
        return before

    def add(self, spans: Spans) -> None:
        """Calls that a CUDA graph repeats."""
        for name, calls in spans.items():
            self._spans.setdefault(name, deque(maxlen=KEPT_SPANS)).extend(calls)

    def milliseconds(self, reset: bool = True) -> dict[str, list[float]]:
        """Milliseconds of each call since the last reset, per span. Waits for the device if it must."""
        return {name: [sum(pieces) for pieces in calls] for name, calls in self.pieces(reset).items()}

    def pieces(self, reset: bool = True) -> dict[str, list[list[float]]]:
        """The same, piece by piece."""
        result: dict[str, list[list[float]]] = {}
        for name, spans in self._spans.items():
            if spans and isinstance(spans[-1][-1], tuple):
                spans[-1][-1][1].synchronize()
                result[name] = [[start.elapsed_time(end) for start, end in pieces] for pieces in spans]
            else:
                result[name] = [list(pieces) for pieces in spans]
        if reset:
            self._spans = {}
        return result


class RideSpans:
    """The spans of one ride, one after the other. Those of the same name are one call.

    spans.begin("dispatch")      the first span
    spans.begin("experts")       ends it, and begins the next
    spans.end()                  ends that one; `begin` goes on after whatever lies between
    """

    def __init__(self, meter: Meter, device: torch.device, direction: str, chunks: int) -> None:
        self._meter, self._device, self._direction, self._chunks = meter, device, direction, chunks
        self._pieces: dict[str, list[Any]] = {}
        self._name, self._begun, self._watched = "", None, watched()
        self._range: AbstractContextManager[Any] | None = None
        # What has been under way ends.
        self.end = partial(self.begin, "")

    def begin(self, name: str, chunk: int = 0) -> None:
        """Work of that name begins here, of that chunk. What has been under way ends."""
        now: Any
        if self._device.type == "cuda":
            # In a CUDA graph, an event that each replay records again.
            now = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
            now.record()
        else:
            now = time.perf_counter()
        if self._name:
            if self._range is not None:
                self._range.__exit__(None, None, None)
                self._range = None
            if self._name not in self._pieces:
                self._pieces[self._name] = self._meter.call(self._name)
            piece = (self._begun, now) if self._device.type == "cuda" else 1e3 * (now - self._begun)
            self._pieces[self._name].append(piece)
        if name and self._watched:
            self._range = self._meter.named(name, self._direction, chunk if self._chunks > 1 else None)
            self._range.__enter__()
        self._name, self._begun = name, now

    def named(self, name: str, chunk: int) -> AbstractContextManager[Any]:
        """Inside a span: work that is to have another name, or of another chunk, for profilers."""
        if not self._watched or (self._chunks == 1 and name == self._name):
            return nullcontext()
        return self._meter.named(name, self._direction, chunk if self._chunks > 1 else None)
