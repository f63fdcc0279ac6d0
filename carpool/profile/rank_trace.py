"""One rank's trace of a step, as PyTorch's profiler writes it, read into pieces of work: when, where, and what for.

A Chrome trace is a list of events. These matter here (times in microseconds, `ts` and `dur`):

    cat                       what it is                                        what is read of it
    user_annotation           a `record_function` range, on a thread            name, pid, tid
    kernel, gpu_memcpy, ...   work on a stream                                  name, args.stream, args.correlation
    cuda_runtime, _driver     the host's call that launched it                  args.correlation, pid, tid
    cpu_op                    the operator that launched it                     args["External id"], pid, tid
    gpu_user_annotation       a range, as long as its kernels, on a stream      name, pid, tid

A kernel belongs to the innermost of our ranges (`carpool::layers.3::forward::dispatch`) in which it was launched: the
launch has the kernel's correlation id, its thread, and its time. Where that says nothing (the launch is missing, or its
thread's number is not that of the ranges), the operator's range counts, then the range drawn over the kernel's stream;
failing these the kernel belongs to no layer.

    kind          what                                                                               counts as
    dispatch      kernels that move rows: ours over NVLink; NCCL's, if launched in a ride's range    ride
    combine       likewise                                                                           ride
    packing       what else a ride launches: plans, permutations, quantisation                       computation
    experts       what runs in the ranges of the experts and of their delayed weight gradients       computation
    computation   everything else                                                                    computation
    other         NCCL outside of rides: FSDP's gathers and reductions, filled slots                 other communication

A trace without kernels is of a CPU: then the ranges themselves are the pieces, and the rest of the thread is
computation.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

STEP = "carpool::step"
RIDES = ("dispatch", "combine")
COMPUTATION = ("experts", "packing", "computation")
OTHER = "other"
EXPERTS = ("experts", "weight-gradients")
"""Pieces whose work is the experts'."""
KINDS = (*RIDES, *COMPUTATION, OTHER)
# Of `carpool.transport.nvlink`.
OUR_RIDES = {"dispatch_kernel": "dispatch", "combine_kernel": "combine"}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = dict[str, Any]

T = TypeVar("T")


class Label(NamedTuple):
    """What a range's name says; "carpool::layers.3::forward::dispatch::1" is ("layers.3", "forward", "dispatch", 1)."""

    layer: str
    direction: str
    piece: str
    chunk: int | None = None

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        return f"{self.layer}, {self.direction}, {self.piece}{chunk}"


@dataclass(frozen=True)
class Piece:
    """Work on one lane (a stream, or a thread) from `start` to `end`, in nanoseconds of the trace's clock."""

    start: int
    end: int
    lane: str
    kind: str
    label: Label | None


@dataclass(frozen=True)
class Recorded:
    """A rank's step. `on_device`: pieces are kernels; otherwise ranges of the host."""

    step: Span
    pieces: list[Piece]
    on_device: bool


def parse(name: str) -> Label | None:
    """The label in a range's name, None if it is not one of ours."""
    parts = name.split("::")
    if parts[0] != "carpool" or len(parts) not in (4, 5):
        return None
    if len(parts) == 4:
        return Label(parts[1], parts[2], parts[3])
    return Label(parts[1], parts[2], parts[3], int(parts[4])) if parts[4].isdigit() else None


def load(path: Path) -> dict[str, Any]:
    """A trace file (.json or .json.gz).

    Raises:
        ValueError: it is no trace."""
    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a trace ({error}): record it again") from None
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace of PyTorch's profiler: it has no list of traceEvents")
    return data


def read(trace: dict[str, Any]) -> Recorded:
    """The step that was recorded in the range `carpool::step`.

    Raises:
        ValueError: there is no such range."""
    events, range_of_step = events_of(trace)
    step = span_of(range_of_step)
    ours: dict[Any, list[tuple[Span, Label]]] = {}
    shown: dict[Any, list[tuple[Span, Label]]] = {}
    for event in events:
        places = {"user_annotation": ours, "gpu_user_annotation": shown}.get(event.get("cat", ""))
        label = parse(event["name"]) if places is not None else None
        if places is not None and label is not None:
            places.setdefault(place_of(event), []).append((span_of(event), label))
    host, device = Innermost(ours), Innermost(shown)
    if not any(event.get("cat") in ON_DEVICE for event in events):
        return Recorded(step, list(_of_host(host, step, place_of(range_of_step))), on_device=False)
    pieces = []
    for event, launch, operator in kernels_of(events):
        start, end = span_of(event)
        known = [host.at(place_of(cause), span_of(cause)[0]) for cause in (launch, operator) if cause is not None]
        label = next(filter(None, known), None) or device.at(place_of(event), (start + end) // 2)
        if end > step[0] and start < step[1]:
            lane = f"stream {argument(event, 'stream') if argument(event, 'stream') is not None else event.get('tid')}"
            pieces.append(Piece(max(start, step[0]), min(end, step[1]), lane, kind_of(event["name"], label), label))
    return Recorded(step, sorted(pieces, key=lambda piece: piece.start), on_device=True)


def events_of(trace: dict[str, Any]) -> tuple[list[Event], Event]:
    """All that took time, and the range of the last step among it.

    Raises:
        ValueError: there is no such range."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == STEP]
    if not steps:
        raise ValueError(f"the trace has no range {STEP!r}: was a step recorded?")
    return events, steps[-1]


def kernels_of(events: list[Event]) -> Iterator[tuple[Event, Event | None, Event | None]]:
    """What ran on the device: the call that launched it, and the operator that did; None where that is not known."""
    launches = {a: event for event in events if event.get("cat") in LAUNCHES if (a := argument(event, "correlation"))}
    operators = {a: event for event in events if event.get("cat") == "cpu_op" if (a := argument(event, "External id"))}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            yield event, launches.get(argument(event, "correlation")), operators.get(argument(event, "External id"))


def kind_of(name: str, label: Label | None) -> str:
    """Of a kernel, see the module's docstring."""
    piece = label.piece if label is not None else ""
    for kernel, ride in OUR_RIDES.items():
        if name.startswith(kernel):
            return piece if piece in RIDES else ride
    if name.startswith(("nccl", "Memcpy PtoP")):
        return piece if piece in RIDES else OTHER
    return "packing" if piece in RIDES else "experts" if piece in EXPERTS else "computation"


def _of_host(ranges: Innermost[Label], step: Span, own: Any) -> Iterable[Piece]:
    for number, place in enumerate(sorted(ranges.places, key=lambda place: (place != own, str(place)))):
        lane = "host" if place == own else f"host {number}"
        at = step[0]
        for (start, end), label in ranges.places[place]:
            start, end = max(start, step[0]), min(end, step[1])
            if start >= end:
                continue
            if place == own and at < start:
                yield Piece(at, start, lane, "computation", None)
            kind = label.piece if label.piece in RIDES else "experts" if label.piece in EXPERTS else OTHER
            yield Piece(start, end, lane, kind, label)
            at = end
        if place == own and at < step[1]:
            yield Piece(at, step[1], lane, "computation", None)


class Innermost(Generic[T]):
    """What the innermost range of a moment stands for. Ranges of one place (a thread, a stream) nest."""

    def __init__(self, ranges: dict[Any, list[tuple[Span, T]]]) -> None:
        self.places = {place: _flat(found) for place, found in ranges.items()}
        self._starts = {place: [span[0] for span, _ in found] for place, found in self.places.items()}

    def at(self, place: Any, moment: int) -> T | None:
        if place not in self.places:
            return None
        index = bisect_right(self._starts[place], moment) - 1
        if index < 0:
            return None
        (_, end), label = self.places[place][index]
        return label if moment < end else None


def _flat(ranges: list[tuple[Span, T]]) -> list[tuple[Span, T]]:
    """Nested ranges as a row of spans, each with its innermost label: 0-9 with 3-5 inside becomes 0-3, 3-5, 5-9."""
    result: list[tuple[Span, T]] = []
    outer: list[tuple[int, T]] = []  # (end, label) of the ranges that are open
    at = 0

    def advance(moment: float) -> None:
        nonlocal at
        while outer:
            end, label = outer[-1]
            stop = end if end < moment else int(moment)
            if at < stop:
                result.append(((at, stop), label))
                at = stop
            if end > moment:
                return
            outer.pop()

    for (start, end), label in sorted(ranges, key=lambda one: (one[0][0], -one[0][1])):
        advance(start)
        at = start
        outer.append((end, label))
    advance(math.inf)
    return result


def span_of(event: dict[str, Any]) -> Span:
    start = round(1000 * event["ts"])
    return start, start + round(1000 * event.get("dur", 0))


def place_of(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def argument(event: dict[str, Any], name: str) -> Any:
    return (event.get("args") or {}).get(name)


FLOWS = ("s", "t", "f")


def merge(traces: Mapping[int, Path], output: Path) -> None:
    """Write the traces of all ranks (by rank) as one file `output` (.json.gz), for Perfetto.

    Every rank numbers its threads, streams and arrows for itself, and counts time from a moment of its own. So in the
    merged trace a process is a rank; threads are numbered anew for each (process, thread) of the rank; an arrow is
    id * ranks + rank; time counts from the first event of all ranks, by their clocks: comparable as far as those agree.
    Ranks are read and written one after the other, so only one trace is in memory at a time.

    Raises:
        ValueError: a file is no trace."""
    origin: int | None = None
    draft = output.with_name(f".{output.name}.part")
    with gzip.open(draft, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for number, (rank, path) in enumerate(sorted(traces.items())):
            data = load(path)
            base = int(data.get("baseTimeNanoseconds", 0))
            times = [event["ts"] for event in data["traceEvents"] if event.get("ph") != "M" and "ts" in event]
            if origin is None:
                origin = base + round(1000 * min(times, default=0.0))
            shift = (base - origin) / 1000
            for event in _renamed(data["traceEvents"], rank, number, len(traces), shift):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    draft.replace(output)


def _renamed(events: list[Any], rank: int, number: int, ranks: int, shift: float) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    processes: dict[Any, str] = {}
    for event in events:
        if event.get("name") == "thread_name":
            names[event.get("pid"), event.get("tid")] = str(event.get("args", {}).get("name", ""))
        elif event.get("name") == "process_labels":
            processes[event.get("pid")] = str(event.get("args", {}).get("labels", ""))
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for event in events:
        if event.get("ph") == "M" or "ts" not in event:
            continue
        place = event.get("pid"), event.get("tid")
        if place not in threads:
            threads[place] = len(threads) + 1
            said = names.get(place) or str(place[1])
            where = processes.get(place[0], str(place[0]))
            name = f"{where}: {said}" if where else said
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": threads[place], "args": {"name": name}}
        moved = {**event, "pid": rank, "tid": threads[place], "ts": round(event["ts"] + shift, 3)}
        if event.get("ph") in FLOWS and isinstance(event.get("id"), int):
            moved["id"] = event["id"] * ranks + number
        yield moved


# Spans of time are (start, end) pairs of integers, exact. A *set* is a list of spans in order, apart from each other
# and not empty; `union` makes one of any spans. The rides of a rank that nothing hides, where # is a kernel:
#
#     rides            ####      ########                 union(rides)         [(0, 4), (10, 18)]
#     computation        ####      ###                    union(computation)   [(2, 6), (12, 15)]
#     exposed          ##        ##   ###                 subtract(...)        [(0, 2), (10, 12), (15, 18)], length 7
Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The set of all moments that lie in at least one span. Empty spans (end <= start) hold none."""
    result: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def subtract(one: list[Span], other: list[Span]) -> list[Span]:
    """The moments of one set that are not in the other."""
    result: list[Span] = []
    first = 0
    for start, end in one:
        while first < len(other) and other[first][1] <= start:
            first += 1
        at, place = start, first
        while place < len(other) and other[place][0] < end:
            if at < other[place][0]:
                result.append((at, other[place][0]))
            at = other[place][1]
            place += 1
        if at < end:
            result.append((at, end))
    return result


def length(spans: list[Span]) -> int:
    """Of a set."""
    return sum(end - start for start, end in spans)
