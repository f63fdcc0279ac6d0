"""What a layer counts and times: traffic and milliseconds of its rides, tokens, load of experts, entropy of weights.

`Traffic` counts by verb and by the rank that rows go to. Counting is always on, because it is cheap: transports know on
the host how many rows they send, or count them in their kernels. `LayerStats` has a layer's tokens and load (one
integer scatter), with its `Traffic` and `Meter`. What is computed again for the backward is counted once (`add_once`).
Nothing here synchronises with the device until somebody asks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch

from carpool.kernels.graph_launches import launches
from carpool.metrics.host import to_device

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
            captured = torch.cuda.is_current_stream_capturing()
            if captured and launches.counted:
                from carpool.kernels.stamps import Stamp

                now = Stamp(self._device)
            else:
                # In another's graph, an event that each replay records again.
                now = torch.cuda.Event(enable_timing=True, external=captured)
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


# What rides send.
VERBS = ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")
# Whole sequences that a plug-in moves before a layer, and their gradients.
MOVES = ("sequences", "sequences_backward")


class HostTraffic(NamedTuple):
    """What the host knows of a traffic, by verb: as `Traffic.rows`, `bytes` and `baseline`."""

    rows: dict[str, list[int]]
    bytes: dict[str, list[int]]
    baseline: dict[str, int]


class Traffic:
    """Rows and bytes that this rank sent, per verb and destination rank. Recomputed rides count: they do travel. Of
    sequences that move, each is a row.

    Attributes:
        rows, bytes: per verb, a list over destination ranks, this rank included.
        baseline: per verb, the bytes to and from other ranks that one row per (token, expert) would have taken for
            this rank's tokens.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._tallies: dict[tuple[str, int, int, tuple[int, ...] | None], torch.Tensor] = {}
        self._host = _zeros(num_ranks)

    def reset(self) -> None:
        self.exchange()
        for tally in self._tallies.values():
            tally.zero_()

    def exchange(self, counts: HostTraffic | None = None) -> HostTraffic:
        """Put `counts` (None: zeros) in the place of what the host has counted, which is returned."""
        before, self._host = self._host, counts or _zeros(self.num_ranks)
        return before

    def repeat(self, counts: HostTraffic) -> None:
        """Count once more what was counted before."""
        for ours, theirs in zip(self._host[:2], counts[:2], strict=True):
            for verb, by_rank in theirs.items():
                ours[verb][:] = map(add, ours[verb], by_rank)
        for verb in VERBS:
            self._host.baseline[verb] += counts.baseline[verb]

    @property
    def rows(self) -> dict[str, list[int]]:
        return self._read().rows

    @property
    def bytes(self) -> dict[str, list[int]]:
        return self._read().bytes

    @property
    def baseline(self) -> dict[str, int]:
        return self._read().baseline

    def add(
        self, verb: str, rows_W: Sequence[int], row_bytes: int, choices_W: Sequence[int] = (), baseline_bytes: int = 0
    ) -> None:
        """`rows_W[r]` rows of `row_bytes` bytes went to rank r. Rows to oneself are counted as local.

        Args:
            choices_W: choices of this rank's tokens on each rank, each of which would have been a row of
                `baseline_bytes`."""
        rows, sizes = self._host.rows[verb], self._host.bytes[verb]
        for rank, n in enumerate(rows_W):
            rows[rank] += n
            sizes[rank] += n * row_bytes
        if choices_W:
            self._host.baseline[verb] += (sum(choices_W) - choices_W[self.rank]) * baseline_bytes

    def tally(
        self, verb: str, row_bytes: int, baseline_bytes: int, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Where kernels count what the host does not know: (2, W) int64 on the device, rows of `row_bytes` bytes to
        each rank, and choices of this rank's tokens on each rank (a row of `baseline_bytes` each). Kernels add to it;
        it is read when somebody asks, and the same tensor each time, so that a CUDA graph may hold it. Rows of 0 bytes
        are none.

        Args:
            ranks: those that a column each is of; None: all."""
        key = (verb, row_bytes, baseline_bytes, ranks)
        if key not in self._tallies:
            number = self.num_ranks if ranks is None else len(ranks)
            self._tallies[key] = new_counter((2, number), torch.int64, device)
        return self._tallies[key]

    def _read(self) -> HostTraffic:
        """Move what the kernels counted into the host's counters. Waits for the device."""
        for key, tally in self._tallies.items():
            verb, row_bytes, baseline_bytes, ranks = key
            rows, choices = self._by_rank(ranks, tally).tolist()
            self.add(verb, rows, row_bytes, choices, baseline_bytes)
            tally.zero_()
        return self._host

    def _by_rank(self, ranks: tuple[int, ...] | None, tally: torch.Tensor) -> torch.Tensor:
        """(2, W) of a tally."""
        if ranks is None:
            return tally
        column = to_device(ranks, tally.device).long()
        return tally.new_zeros(2, self.num_ranks).index_copy_(1, column, tally)

    @staticmethod
    def totals(layers: Sequence[Traffic], device: torch.device, far: Sequence[int] = ()) -> torch.Tensor:
        """What several layers counted, without waiting for the device.

        Args:
            far: the ranks of other nodes.

        Returns:
            (L, W + 4) float64: rows dispatched to each rank; and to other ranks rows dispatched, bytes, and the bytes
            that one row per (token, expert) would have taken, plans included; bytes to ranks that are far."""
        on_host = []
        for one in layers:
            rows, sizes, baseline = one._host
            plan = one.remote(sizes, "plan")
            crossed = sum(by_rank[rank] for by_rank in sizes.values() for rank in far)
            own = [one.remote(rows, "dispatch"), one.remote(sizes), sum(baseline.values()) + plan, crossed]
            on_host.append([*rows["dispatch"], *own])
        total = to_device(on_host, device)
        places = [(number, one.rank, key) for number, one in enumerate(layers) for key in one._tallies]
        if not places:
            return total
        about = [
            (layer, rank, verb == "dispatch", verb == "plan", row_bytes, baseline_bytes)
            for layer, rank, (verb, row_bytes, baseline_bytes, _) in places
        ]
        layer_N, rank_N, dispatch_N, plan_N, row_N, baseline_N = to_device(about, device).unbind(1)
        tallies = [layers[number]._by_rank(key[3], layers[number]._tallies[key]) for number, _, key in places]
        counted_N2W = torch.stack(tallies).double()
        own_N2 = counted_N2W.gather(2, rank_N.long().view(-1, 1, 1).expand(-1, 2, 1)).squeeze(2)
        rows_N, choices_N = (counted_N2W.sum(2) - own_N2).unbind(1)
        far_N = counted_N2W[:, 0] @ to_device([float(r in far) for r in range(layers[0].num_ranks)], device)
        rest = [rows_N * dispatch_N, rows_N * row_N, choices_N * baseline_N + rows_N * row_N * plan_N, far_N * row_N]
        rows_NW = counted_N2W[:, 0] * dispatch_N.unsqueeze(1)
        return total.index_add_(0, layer_N.long(), torch.cat([rows_NW, torch.stack(rest, 1)], 1))

    def remote(self, what: dict[str, list[int]], *verbs: str) -> int:
        total = 0
        for verb in verbs or what:
            total += sum(what[verb]) - what[verb][self.rank]
        return total


def _zeros(num_ranks: int) -> HostTraffic:
    rows, sizes = ({verb: [0] * num_ranks for verb in (*VERBS, *MOVES)} for _ in range(2))
    return HostTraffic(rows, sizes, dict.fromkeys(VERBS, 0))


def new_counter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that every later forward can add to: what is made in inference mode cannot be changed outside of it."""
    if not torch.is_inference_mode_enabled():
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def add_once(counter: torch.Tensor, amount: torch.Tensor) -> None:
    """`counter += amount`, unless this forward is computed again. Compiled, the graph asks each time that it runs."""
    if torch.compiler.is_compiling():
        counter += amount * _is_first(counter)
    elif not in_recompute():
        counter += amount


@torch.library.custom_op("carpool::is_first_forward", mutates_args=())
def _is_first(like: torch.Tensor) -> torch.Tensor:
    """() int64 on the device of `like`: 0 if this forward is computed again, else 1."""
    return torch.full((), 0 if in_recompute() else 1, dtype=torch.int64, device=like.device)


@_is_first.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)


@dataclass(frozen=True)
class HostCounts:
    """What a layer counts on the host: see `LayerStats`, `Meter` for the spans, and `Traffic`; None: no traffic."""

    tokens: int = 0
    tokens_dispatched: int = 0
    spans: Spans = field(default_factory=dict)
    traffic: HostTraffic | None = None


class LayerStats:
    """Counters of one layer on one rank, since the last `reset`."""

    def __init__(self, num_experts: int, num_ranks: int, rank: int) -> None:
        self.traffic = Traffic(num_ranks, rank)
        self.meter = Meter()
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
            self._load_E = new_counter((self.num_experts + 1,), torch.int64, expert_TK.device)
            self._entropy = new_counter((), torch.float64, expert_TK.device)
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
        return torch.zeros(self.num_experts, dtype=torch.int64) if self._load_E is None else self._load_E[:-1]

    @property
    def entropy(self) -> torch.Tensor:
        """Sum over this rank's tokens of the entropy of their K weights, in nats: 0 if one expert has all of the
        weight, ln K if all have the same."""
        return torch.zeros((), dtype=torch.float64) if self._entropy is None else self._entropy

    def exchange(self, counts: HostCounts) -> HostCounts:
        """Put `counts` in the place of what was counted on the host since the last reset, which is returned."""
        spans, traffic = self.meter.exchange(counts.spans), self.traffic.exchange(counts.traffic)
        sent = None if traffic == _zeros(self.traffic.num_ranks) else traffic
        before = HostCounts(self.tokens, self.tokens_dispatched, spans, sent)
        self.tokens, self.tokens_dispatched = counts.tokens, counts.tokens_dispatched
        return before

    def add(self, counts: HostCounts) -> None:
        """Count on the host what a CUDA graph repeats: what it counts on the device it counts by itself."""
        self.tokens += counts.tokens
        self.tokens_dispatched += counts.tokens_dispatched
        self.meter.add(counts.spans)
        if counts.traffic is not None:
            self.traffic.repeat(counts.traffic)

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
        sizes = ", ".join(f"{verb} {size} B" for verb, size in self.bytes_remote.items() if size)
        return (
            f"{self.tokens} tokens, {self.copies_per_token:.2f} copies each (of {self.num_experts_per_tok} experts), "
            f"{self.rows_local} rows stayed, {self.rows_remote} went to other ranks"
            f"{f': {sizes}' if sizes else ''}; "
            f"load max/mean {max(self.load_E, default=0) / mean if mean else 0.0:.2f}, "
            f"{sum(n == 0 for n in self.load_E)} experts idle, {self.dropped} choices dropped"
        )
