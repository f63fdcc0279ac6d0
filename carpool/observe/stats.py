"""What a layer counted: rows and bytes per verb and destination, tokens per expert, and milliseconds.

Counting is always on, because it is cheap: transports know on the host how many rows they send, or count them in their
kernels; the load is one integer scatter, and times are a pair of events (CUDA) or clock readings (CPU) around each
verb. Nothing here synchronises with the device until somebody asks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from carpool.kernels.numbered import Numbered
from carpool.ride.hooks import Beside

VERBS = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")


def in_recompute() -> bool:
    """Whether this forward is the second one of activation checkpointing.

    Both kinds of checkpointing (reentrant or not) recompute inside the backward pass, where autograd has a graph
    task under way. Counting tokens there again is a known bug of load statistics.
    """
    return torch._C._current_graph_task_id() != -1


class Traffic:
    """Rows and bytes that this rank sent, per verb and destination rank. Recomputed rides count: they do travel.

    Attributes:
        rows, bytes: per verb, a list over destination ranks, this rank included.
        baseline: per verb, the bytes to and from other ranks that one row per (token, expert) would have taken for
            this rank's tokens.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._tallies: dict[tuple[str, int, int], torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        self._rows: dict[str, list[int]] = {verb: [0] * self.num_ranks for verb in VERBS}
        self._bytes: dict[str, list[int]] = {verb: [0] * self.num_ranks for verb in VERBS}
        self._baseline: dict[str, int] = dict.fromkeys(VERBS, 0)
        for tally in self._tallies.values():
            tally.zero_()

    @property
    def rows(self) -> dict[str, list[int]]:
        return self._read()._rows

    @property
    def bytes(self) -> dict[str, list[int]]:
        return self._read()._bytes

    @property
    def baseline(self) -> dict[str, int]:
        return self._read()._baseline

    def add(self, verb: str, rows_W: Sequence[int], row_bytes: int) -> None:
        """`rows_W[r]` rows of `row_bytes` bytes went to rank r. Rows to oneself are counted as local."""
        for rank, n in enumerate(rows_W):
            self._rows[verb][rank] += n
            self._bytes[verb][rank] += n * row_bytes

    def add_baseline(self, verb: str, choices_W: Sequence[int], row_bytes: int) -> None:
        """This rank's tokens have `choices_W[r]` choices on rank r, each of which would have been a row."""
        self._baseline[verb] += (sum(choices_W) - choices_W[self.rank]) * row_bytes

    def tally(self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device) -> torch.Tensor:
        """Where kernels count what the host does not know: (2, W) int64 on the device, rows of `row_bytes` bytes to
        each rank, and choices of this rank's tokens on each rank (a row of `baseline_bytes` each). Kernels add to it;
        it is read when somebody asks, and the same tensor each time, so that a CUDA graph may hold it."""
        key = (verb, row_bytes, baseline_bytes)
        if key not in self._tallies:
            self._tallies[key] = torch.zeros(2, self.num_ranks, dtype=torch.int64, device=device)
        return self._tallies[key]

    def _read(self) -> Traffic:
        """Move what the kernels counted into the host's counters. Waits for the device."""
        self.read_all([self])
        return self

    @staticmethod
    def read_all(layers: Sequence[Traffic]) -> list[tuple[dict[str, list[int]], dict[str, list[int]], dict[str, int]]]:
        """(rows, bytes, baseline) of several layers. Reads the device once for all that their kernels counted."""
        places = [(traffic, key) for traffic in layers for key in traffic._tallies]
        if places:
            tallies = [traffic._tallies[key] for traffic, key in places]
            counted = torch.stack(tallies).tolist()
            for (traffic, (verb, row_bytes, baseline_bytes)), (rows, choices) in zip(places, counted, strict=True):
                traffic.add(verb, rows, row_bytes)
                traffic.add_baseline(verb, choices, baseline_bytes)
            torch._foreach_zero_(tallies)
        return [(traffic._rows, traffic._bytes, traffic._baseline) for traffic in layers]

    def remote(self, what: dict[str, list[int]], *verbs: str) -> int:
        return sum(sum(what[v]) - what[v][self.rank] for v in verbs or VERBS)


# Nsight sets one of them for the programs that it starts.
NSIGHT = any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"))


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


class Meter:
    """Milliseconds of the latest calls of each named span, also shown to profilers.

    PyTorch's profiler sees them as `record_function` ranges, which are NVTX ranges under `emit_nvtx` (and `nsys profile
    --pytorch=autograd-nvtx`); Nsight alone sees NVTX ranges.

    Attributes:
        layer: what profilers call the layer; whoever knows its name sets it.
    """

    def __init__(self, layer: str = "moe") -> None:
        self.layer = layer
        self._spans: dict[str, deque[list[Any]]] = {}

    def ride(self, device: torch.device, direction: str, chunks: int = 1) -> RideSpans:
        """`span` for one ride."""
        return RideSpans(self, device, direction, chunks)

    def named(self, name: str, direction: str, chunk: int | None = None) -> AbstractContextManager[Any]:
        """A range that profilers see around the enclosed work, without timing it."""
        if not watched():
            return nullcontext()
        if direction == "forward" and in_recompute():
            direction = "recompute"
        return shown(range_name(self.layer, direction, name, chunk))

    @contextmanager
    def span(
        self,
        name: str,
        device: torch.device,
        more: bool = False,
        direction: str = "forward",
        chunk: int | None = None,
    ) -> Iterator[None]:
        """Time the enclosed work on `device`: by events in the current stream on CUDA, by the clock elsewhere.

        Args:
            more: it belongs to the latest call of that name.
            direction, chunk: for profilers.
        """
        with self.named(name, direction, chunk):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._keep(name, (start, end), more)
            else:
                begin = time.perf_counter()
                yield
                self._keep(name, 1e3 * (time.perf_counter() - begin), more)

    def _keep(self, name: str, piece: Any, more: bool) -> None:
        calls = self._spans.setdefault(name, deque(maxlen=KEPT_SPANS))
        if more and calls:
            calls[-1].append(piece)
        else:
            calls.append([piece])

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
    """The spans of one ride. Its pieces of the same name are one call."""

    def __init__(self, meter: Meter, device: torch.device, direction: str, chunks: int) -> None:
        self._meter, self._device, self._direction, self._chunks = meter, device, direction, chunks
        self._seen: set[str] = set()

    def __call__(self, name: str, chunk: int = 0) -> AbstractContextManager[None]:
        """Time the enclosed work, which is of that chunk."""
        more = name in self._seen
        self._seen.add(name)
        return self._meter.span(name, self._device, more, self._direction, self._shown(chunk))

    def named(self, name: str, chunk: int) -> AbstractContextManager[Any]:
        """Inside a span: work that is to have another name, or of another chunk, for profilers."""
        if self._chunks == 1 and name in self._seen:
            return nullcontext()
        return self._meter.named(name, self._direction, self._shown(chunk))

    def _shown(self, chunk: int) -> int | None:
        return chunk if self._chunks > 1 else None


class LayerStats(Numbered):
    """Counters of one layer on one rank, since the last `reset`.

    Attributes:
        beside: is told where the layer's backward rides are.
    """

    def __init__(self, num_experts: int, num_ranks: int, rank: int) -> None:
        self.traffic = Traffic(num_ranks, rank)
        self.meter = Meter()
        self.beside = Beside()
        self.num_experts = num_experts
        self._load_E: torch.Tensor | None = None
        self._entropy: torch.Tensor | None = None
        self.tokens = self.tokens_dispatched = 0
        self.top_k = 0

    @torch.no_grad()
    def count(self, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        """Count the tokens and the load of one forward; a recomputed one is not counted. (If its rows travel again, the
        ride adds them to `tokens_dispatched` and to the traffic again.)"""
        if in_recompute():
            return
        if self._load_E is None or self._entropy is None:
            self._load_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=expert_TK.device)
            self._entropy = torch.zeros((), dtype=torch.float64, device=expert_TK.device)
        weight_TK = weight_TK.masked_fill(expert_TK < 0, 0.0)
        share_TK = weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=1e-20)
        self._entropy -= torch.special.xlogy(share_TK, share_TK).sum()
        # -1 ("no expert") goes to the last place, which nobody reads: no host synchronisation to filter it out.
        index = torch.where(expert_TK < 0, self.num_experts, expert_TK).reshape(-1).long()
        self._load_E.scatter_add_(0, index, torch.ones_like(index))
        self.tokens += expert_TK.shape[0]
        self.top_k = expert_TK.shape[1]

    @property
    def load_E(self) -> torch.Tensor:
        """(E,) int64: choices of each expert by this rank's tokens."""
        if self._load_E is None:
            return torch.zeros(self.num_experts, dtype=torch.int64)
        return self._load_E[:-1]

    @property
    def entropy(self) -> torch.Tensor:
        """Sum over this rank's tokens of the entropy of their K weights, in nats: 0 if one expert has all of the
        weight, ln K if all have the same."""
        return torch.zeros((), dtype=torch.float64) if self._entropy is None else self._entropy

    def summary(self) -> RideStats:
        traffic = self.traffic
        return RideStats(
            tokens=self.tokens,
            tokens_dispatched=self.tokens_dispatched,
            num_experts_per_tok=self.top_k,
            rows_dispatched=sum(traffic.rows["dispatch"]),
            rows_remote=traffic.remote(traffic.rows, "dispatch"),
            bytes_local={verb: traffic.bytes[verb][traffic.rank] for verb in VERBS},
            bytes_remote={verb: traffic.remote(traffic.bytes, verb) for verb in VERBS},
            load_E=tuple(self.load_E.tolist()),
        )

    def reset(self) -> None:
        self.traffic.reset()
        self.meter.milliseconds(reset=True)
        if self._load_E is not None and self._entropy is not None:
            self._load_E.zero_()
            self._entropy.zero_()
        self.tokens = self.tokens_dispatched = 0


@dataclass(frozen=True)
class RideStats:
    """What one rank's tokens did in one layer. Rows to the own rank are copies, but not remote.

    Activation checkpointing sends a token's rows twice: `tokens` counts it once, `tokens_dispatched`, rows and bytes
    twice."""

    tokens: int
    tokens_dispatched: int
    num_experts_per_tok: int
    rows_dispatched: int
    rows_remote: int
    bytes_local: dict[str, int]
    bytes_remote: dict[str, int]
    load_E: tuple[int, ...] = field(repr=False)
    dropped: int = 0

    @property
    def rows_local(self) -> int:
        """Rows that stayed on their own rank."""
        return self.rows_dispatched - self.rows_remote

    @property
    def copies_per_token(self) -> float:
        """Rows dispatched per token, the copy that stays on the own rank included."""
        return self.rows_dispatched / self.tokens_dispatched if self.tokens_dispatched else 0.0

    def __str__(self) -> str:
        mean = sum(self.load_E) / max(1, len(self.load_E))
        return (
            f"{self.tokens} tokens, {self.copies_per_token:.2f} copies each (of {self.num_experts_per_tok} experts), "
            f"{self.rows_local} rows stayed, {self.rows_remote} went to other ranks: "
            + ", ".join(f"{verb} {size} B" for verb, size in self.bytes_remote.items() if size)
            + f"; load max/mean {max(self.load_E, default=0) / mean if mean else 0.0:.2f}, "
            f"{sum(n == 0 for n in self.load_E)} experts idle, {self.dropped} choices dropped"
        )
