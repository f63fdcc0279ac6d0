"""A training step as a graph of events, and when each of them runs.

An *event* is a piece of work: attention of layer 3, a dispatch, a gather of parameters. It has a length in seconds,
runs on a *stream*, and waits for other events. Two rules say when it runs:

    a stream does its events one at a time, in the order in which they were added to the graph
    an event starts when its stream is free and everything that it waits for has ended

Ranks are alike: all ranks of a pipeline stage do the same events, each with a length of its own. They meet in events
with a `Group` (rides, gathers, reductions): such an event begins when the last rank of the group arrives, and ends for
all of them when the longest has ended. So a step takes the *sum over meetings of the maximum over ranks*, and not the
maximum over ranks of the sum.

    graph = Graph()
    attention = graph.add("layers.0::forward::attention", "attention", 2.0)
    dispatch = graph.add("layers.0::forward::dispatch", "dispatch", 1.0, (attention,), group=Group(2))
    graph.add("layers.0::forward::experts", "experts", 3.0, (dispatch,))

    execute(graph).step                                   6.0, for any number of ranks that are alike
    execute(graph, ranks=2, seconds=lambda event: slowed).step

                 0   1   2   3   4   5   6   7   8        rank 1 needs 3.0 for attention, rank 0 needs 4.0 for experts:
    rank 0       attention   | wait  dispatch experts ... 3.0 + 1.0 + 4.0 = 8.0, though neither rank has more than 7.0

The lengths of a graph are those of balanced ranks. Whoever knows better passes `seconds`, a function of the event:
bounds, sampled loads of experts, a rank that is slow. Nothing else changes.

A search asks for thousands of steps of balanced ranks, which `carpool.planner.step.clock` runs sooner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Seconds = float | Array  # of all ranks, or of each rank of a stage

COMPUTATION, RIDES, COLLECTIVES, SENDS, COPIES, HOST = (
    "computation", "rides", "collectives", "sends", "copies", "host",
)  # fmt: skip
STREAM_OF = MappingProxyType({
    # What computes.
    "attention": COMPUTATION, "dense": COMPUTATION, "experts": COMPUTATION, "packing": COMPUTATION,
    "elementwise": COMPUTATION, "loss": COMPUTATION, "optimizer": COMPUTATION,
    # Rows to experts and back.
    "dispatch": RIDES, "combine": RIDES,
    # Other communication: of parameters, of gradients, between stages of a pipeline.
    "all-gather": COLLECTIVES, "reduction": COLLECTIVES, "send": SENDS,
    # Between the device and host memory; what the host does.
    "offload": COPIES, "host": HOST,
})  # fmt: skip
"""Kinds of events, and the stream of each unless the event names another. Streams may have any name."""
KINDS = tuple(STREAM_OF)
# In which ranks wait for data of others.
COMMUNICATION = ("dispatch", "combine", "all-gather", "reduction", "send")
IDLE = "idle"
Spans = dict[str, list[tuple[float, float]]]  # Of a rank: when events of each kind start and end.


class Group(NamedTuple):
    """Ranks that meet: `size` of them, `stride` apart, as an axis of `carpool.parallel.degrees` has them.

    Example: of 8 ranks, Group(2) is 01 23 45 67, and Group(2, 4) is 04 15 26 37."""

    size: int
    stride: int = 1


class Event(NamedTuple):
    """One piece of work of all ranks of a stage. Made by `Graph.add`.

    Attributes:
        name: "layers.3::forward::dispatch", as the profiler's ranges have it.
        kind: a key of `STREAM_OF`.
        seconds: how long it takes on balanced ranks.
        after: the events that it waits for, by number.
        low, high: bounds of `seconds`.
        fixed: the part of `seconds` that does not grow with the work, such as a link's latency.
        layer: of the model; None: of none.
        phase: "forward", "backward" or "update".
        group: which ranks of the stage meet in it; None: each rank is alone.
    """

    name: str
    kind: str
    seconds: Seconds
    after: tuple[int, ...]
    stream: str
    low: Seconds
    high: Seconds
    fixed: float = 0.0
    layer: int | None = None
    phase: str = "forward"
    stage: int = 0
    micro_batch: int = 0
    group: Group | None = None


@dataclass
class Graph:
    """Events in an order in which each comes after all that it waits for."""

    events: list[Event] = field(default_factory=list)

    def add(
        self,
        name: str,
        kind: str,
        seconds: Seconds,
        after: Iterable[int] = (),
        *,
        stream: str | None = None,
        low: Seconds | None = None,
        high: Seconds | None = None,
        **more: Any,
    ) -> int:
        """Add an event and return its number, which others wait for. `more`: fields of `Event`."""
        number = len(self.events)
        after = tuple(after)
        assert min(after, default=0) >= 0 and max(after, default=-1) < number, (
            f"{name} waits for {after}, not all there"
        )
        low, high = seconds if low is None else low, seconds if high is None else high
        self.events.append(Event(name, kind, seconds, after, stream or STREAM_OF[kind], low, high, **more))
        return number

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return 1 + max((event.stage for event in self.events), default=0)


class OnPath(NamedTuple):
    """An event of the critical path, on the rank of its stage that was last, and how long it took there."""

    event: Event
    rank: int
    seconds: float


@dataclass(frozen=True)
class Execution:
    """When everything ran.

    Attributes:
        ranks: of a stage.
        kept: the ranks of each stage whose times are kept.
        arrive_EK: (events, kept ranks) seconds at which a rank was ready for an event. Where ranks meet it waits from
            here on, its stream occupied.
        end_EK: the same of an event's end.
        end_SR: (stages, ranks) when each rank had done everything.
        path: the critical path: events that follow each other without a gap, from the start of the step to its end.
    """

    graph: Graph
    ranks: int
    kept: tuple[int, ...]
    arrive_EK: Array
    end_EK: Array
    end_SR: Array
    path: tuple[OnPath, ...]

    @property
    def step(self) -> float:
        """Seconds from the first event to the last."""
        return float(self.end_SR.max())

    def path_seconds(self) -> dict[str, float]:
        """The critical path by kind; adds up to `step`."""
        found: dict[str, float] = defaultdict(float)
        for event, _, seconds in self.path:
            found[event.kind] += seconds
        return dict(found)

    def exposed_seconds(self, stage: int = 0, rank: int | None = None) -> dict[str, float]:
        """The step of one rank divided among kinds: what computes, what else is exposed, and `IDLE`; adds up to `step`.

        Of events that run at once, the one whose kind comes first in `KINDS` counts. So communication counts where
        nothing computes, which includes waiting for other ranks.

        Args:
            rank: of the stage, one of `kept`; None: the first of these."""
        at = self.kept.index(rank) if rank is not None else 0
        spans: Spans = defaultdict(list)
        for event, arrive, end in zip(self.graph.events, self.arrive_EK[:, at], self.end_EK[:, at], strict=True):
            if event.stage == stage:
                spans[event.kind].append((arrive, end))
        return exposed_of(spans, self.step)


def exposed_of(spans: Spans, step: float) -> dict[str, float]:
    """As `Execution.exposed_seconds`, of the events of a rank."""
    # The moments at which anything starts or ends, and which of the pieces between them belong to a kind.
    moments = np.unique([0.0, step, *(moment for own in spans.values() for span in own for moment in span)])
    lengths, taken = np.diff(moments), np.zeros(len(moments) - 1, dtype=bool)
    found = {}
    for kind in filter(spans.__contains__, KINDS):
        starts, ends = np.searchsorted(moments, np.array(spans[kind]).T)
        change = np.bincount(starts, minlength=len(moments)) - np.bincount(ends, minlength=len(moments))
        running = (np.cumsum(change) > 0)[:-1]
        found[kind] = float(lengths[running & ~taken].sum())
        taken |= running
    found[IDLE] = float(lengths[~taken].sum())
    return found


def execute(
    graph: Graph, ranks: int = 1, seconds: Callable[[Event], Seconds] | None = None, kept: Sequence[int] | None = None
) -> Execution:
    """Run a graph.

    Args:
        ranks: of each stage. With 1, that rank stands for all, and meetings wait for nobody.
        seconds: the length of an event, one number or (ranks,), the same each time; None: `event.seconds`.
        kept: ranks of a stage whose times are to be kept; None: all.

    Raises:
        ValueError: a group does not divide the ranks."""
    of = seconds or (lambda event: event.seconds)
    if ranks == 1:
        return _execute_one(graph, of)
    return _execute_ranks(graph, ranks, of, tuple(range(ranks)) if kept is None else tuple(kept))


def _waits(graph: Graph) -> list[tuple[int, ...]]:
    """Of each event: what it waits for, and the event before it on its stream."""
    before: dict[tuple[int, str], int] = {}
    found = []
    for number, event in enumerate(graph.events):
        stream = event.stage, event.stream
        last = (before[stream],) if stream in before else ()
        found.append(tuple(dict.fromkeys((*event.after, *last))))
        before[stream] = number
    return found


def _execute_one(graph: Graph, of: Callable[[Event], Seconds]) -> Execution:
    arrive, end = list[float](), list[float]()
    before: dict[tuple[int, str], int] = {}
    previous: list[int | None] = []  # of each event, the one before it on its stream
    for number, event in enumerate(graph.events):
        stream = event.stage, event.stream
        last = before.get(stream)
        begin = 0.0 if last is None else end[last]
        for one in event.after:
            if end[one] > begin:
                begin = end[one]
        before[stream] = number
        previous.append(last)
        arrive.append(begin)
        took = of(event)
        end.append(begin + float(took if np.ndim(took) == 0 else took[0]))  # type: ignore[index]
    ends = [0.0] * graph.stages
    for event, moment in zip(graph.events, end, strict=True):
        ends[event.stage] = max(ends[event.stage], moment)
    path = []
    at = max(range(len(end)), key=end.__getitem__, default=None)
    while at is not None:
        path.append(OnPath(graph.events[at], 0, end[at] - arrive[at]))
        own = () if (last := previous[at]) is None else (last,)
        at = max((*graph.events[at].after, *own), key=end.__getitem__, default=None)
    return Execution(
        graph, 1, (0,), np.array(arrive)[:, None], np.array(end)[:, None], np.array(ends)[:, None], tuple(path[::-1])
    )


def _execute_ranks(graph: Graph, ranks: int, of: Callable[[Event], Seconds], kept: tuple[int, ...]) -> Execution:
    waits = _waits(graph)
    # Times of all ranks are dropped after their last use; of each event, who was waited for is kept, in few bytes.
    last_use = {one: number for number, awaited in enumerate(waits) for one in awaited}
    drop: dict[int, list[int]] = defaultdict(list)
    for one, number in last_use.items():
        drop[number].append(one)
    end_of: dict[int, Array] = {}
    decided: list[Array | None] = []  # (ranks,) uint8: which of the event's waits was the last; None: there is one
    late: list[Array | None] = []  # of an event with a group: the last rank to arrive, by group
    arrive_EK, end_EK = np.zeros((2, len(waits), len(kept)))
    end_SR = np.zeros((graph.stages, ranks))
    last = (-1.0, 0, 0)  # (end, event, rank) of what ends last
    columns = np.array(kept)
    for number, (event, awaited) in enumerate(zip(graph.events, waits, strict=True)):
        arrive_R = end_of[awaited[0]] if awaited else np.zeros(ranks)
        decided_R = None
        for position, one in enumerate(awaited[1:], 1):
            if decided_R is None:
                decided_R = np.zeros(ranks, dtype=np.uint8)
            np.putmask(decided_R, end_of[one] > arrive_R, position)
            arrive_R = np.maximum(arrive_R, end_of[one])
        took = of(event)
        if event.group is None or event.group.size == 1:
            end_R = arrive_R + took
            late.append(None)
        else:
            grid = _grid(event, ranks)
            arrived = arrive_R.reshape(grid)
            last_one = arrived.argmax(1)
            begin = np.take_along_axis(arrived, last_one[:, None], 1)
            longest = took if np.ndim(took) == 0 else np.reshape(took, grid).max(1, keepdims=True)
            end_R = np.broadcast_to(begin + longest, grid).reshape(ranks)
            late.append(last_one.astype(np.int32))
        decided.append(decided_R)
        arrive_EK[number], end_EK[number] = arrive_R[columns], end_R[columns]
        np.maximum(end_SR[event.stage], end_R, out=end_SR[event.stage])
        last = max(last, (float(end_R.max()), number, int(end_R.argmax())))
        end_of[number] = end_R
        for one in drop[number]:
            del end_of[one]
    path = []
    at, rank = last[1:]
    while graph.events:
        event, late_at = graph.events[at], late[at]
        took = np.broadcast_to(np.asarray(of(event), dtype=float), (ranks,))
        if late_at is None:
            path.append(OnPath(event, rank, float(took[rank])))
        else:
            grid = _grid(event, ranks)
            outer, _, inner = np.unravel_index(rank, grid)
            longest = float(took.reshape(grid)[outer, :, inner].max())
            rank = int(np.ravel_multi_index((outer, late_at[outer, inner], inner), grid))
            path.append(OnPath(event, rank, longest))
        if not waits[at]:
            break
        decided_at = decided[at]
        at = waits[at][0 if decided_at is None else decided_at[rank]]
    return Execution(graph, ranks, kept, arrive_EK, end_EK, end_SR, tuple(path[::-1]))


def _grid(event: Event, ranks: int) -> tuple[int, int, int]:
    """The shape of (ranks,) in which an event's groups lie along axis 1."""
    assert event.group is not None
    size, stride = event.group
    if ranks % (size * stride):
        raise ValueError(
            f"{event.name}: groups of {size} ranks, {stride} apart, do not divide {ranks} ranks of a stage"
        )
    return ranks // (size * stride), size, stride
