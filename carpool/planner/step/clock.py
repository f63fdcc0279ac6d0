"""The steps of a search: of balanced ranks, run as they are built.

A search asks for thousands of steps. `Clock` takes the calls of a `Graph` (`carpool.planner.step.events`) and runs them
at once; what a step does again for each micro-batch is recorded once, and then run many times.

    tape = Tape(inputs=1)                                     numbers 0, 1, ... are events from outside
    a = tape.add("a", "attention", 2.0, (0,))
    b = tape.add("b", "dense", 1.0, (a, 0))
    c = tape.add("c", "dispatch", 3.0, (b,))
    program = tape.program([c])                               computation: 2.0 and 1.0, after 0; rides: 3.0, after these
    (end,) = clock.run(program, stage=0, after=[(first,)])

A program leaves out what other waits imply, and takes events of a stream together that nobody else waits for, so its
steps are those of the graph but for how sums are rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from carpool.planner.step.events import STREAM_OF


class Stretch(NamedTuple):
    """Events of one stream, one after the other.

    Attributes:
        stream: where they run.
        waits: what the first of them waits for, by number: inputs of the program come first, then stretches.
        total: seconds of all.
        events: kind and seconds of each.
    """

    stream: str
    waits: tuple[int, ...]
    total: float
    events: list[tuple[str, float]]


class Program(NamedTuple):
    """Recorded events of one stage.

    Attributes:
        stretches: in an order in which each comes after all that it waits for.
        ends: whose ends are wanted, by number.
    """

    stretches: tuple[Stretch, ...]
    ends: tuple[int, ...]


class Tape:
    """Records events of one stage; takes the calls of a `Graph`. `inputs`: events from outside, numbers 0, 1, ...
    here."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._order: list[tuple[str, tuple[int, ...]]] = []
        self._lengths: list[tuple[str, float]] = []

    def add(
        self, name: str, kind: str, seconds: float, after: Iterable[int] = (), *, stream: str | None = None, **more: Any
    ) -> int:
        """As `Graph.add`; all events are of one stage."""
        return self.record(stream or STREAM_OF[kind], kind, seconds, tuple(after))

    def record(self, stream: str, kind: str, seconds: float, after: tuple[int, ...], stage: int = 0) -> int:
        assert seconds >= 0, f"an event on {stream} takes {seconds} s"
        self._order.append((stream, after))
        self._lengths.append((kind, seconds))
        return self._inputs + len(self._order) - 1

    def program(self, ends: Sequence[int]) -> Program:
        """What was recorded. `ends`: events whose ends are wanted."""
        found = _layout(self._inputs, tuple(self._order), tuple(ends))
        events: list[list[tuple[str, float]]] = [[] for _ in found.stretches]
        for at, (kind, seconds) in zip(found.place, self._lengths, strict=True):
            if seconds:
                events[at].append((kind, seconds))
        stretches = [
            Stretch(*stretch, sum(seconds for _, seconds in of), of)
            for stretch, of in zip(found.stretches, events, strict=True)
        ]
        return Program(tuple(stretches), found.ends)


class _Layout(NamedTuple):
    """A program but for its lengths: stretches as (stream, waits), the stretch of each event, and `ends`."""

    stretches: tuple[tuple[str, tuple[int, ...]], ...]
    place: tuple[int, ...]
    ends: tuple[int, ...]


@lru_cache(maxsize=1024)
def _layout(inputs: int, events: tuple[tuple[str, tuple[int, ...]], ...], ends: tuple[int, ...]) -> _Layout:
    """Of (stream, after) of each event. Configurations of a search have few orders of events."""
    # Of each event, a bit for each event that ends no later, because it is waited for.
    earlier = [1 << number for number in range(inputs)]
    on_stream: dict[str, int] = defaultdict(int)
    waits, needed = [], set(ends)
    for stream, after in events:
        before = on_stream[stream]
        left = [one for one in dict.fromkeys(after) if not before >> one & 1]
        left = [one for one in left if not any(earlier[other] >> one & 1 for other in left if other != one)]
        for one in left:
            before |= earlier[one]
        on_stream[stream] = before = before | 1 << len(earlier)
        earlier.append(before)
        waits.append(left)
        needed.update(left)
    stretches: list[tuple[str, tuple[int, ...]]] = []
    place = list(range(inputs))  # of each event, the number of its stretch
    going: dict[str, int] = {}  # stretches that nobody waits for so far, by stream
    for (stream, _), left in zip(events, waits, strict=True):
        if left or stream not in going:
            going[stream] = inputs + len(stretches)
            stretches.append((stream, tuple(place[one] for one in left)))
        place.append(going[stream])
        if len(place) - 1 in needed:
            del going[stream]
    return _Layout(tuple(stretches), tuple(one - inputs for one in place[inputs:]), tuple(place[one] for one in ends))


class Clock:
    """A `Graph` that is run as it is built, one rank for each stage.

    Args:
        watched: the stage whose `spans` are wanted; None: no stage's.
    """

    def __init__(self, watched: int | None = None) -> None:
        self.watched, self.spans = watched, defaultdict[str, list[tuple[float, float]]](list)
        self._end: list[float] = []
        self._last: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(
        self,
        name: str,
        kind: str,
        seconds: float,
        after: Iterable[int] = (),
        *,
        stream: str | None = None,
        stage: int = 0,
        **more: Any,
    ) -> int:
        """As `Graph.add`."""
        return self.record(stream or STREAM_OF[kind], kind, seconds, after, stage)

    def record(self, stream: str, kind: str, seconds: float, after: Iterable[int], stage: int = 0) -> int:
        last = self._last[stage]
        begin = self._ready(last[stream], after)
        last[stream] = end = begin + seconds
        if stage == self.watched:
            self.spans[kind].append((begin, end))
        self._end.append(end)
        return len(self._end) - 1

    def run(self, program: Program, stage: int, after: Iterable[Iterable[int]]) -> Sequence[int]:
        """Add the events of a program, and return the numbers of those whose ends it is to tell.

        Args:
            after: of each input of the program, what it stands for: the last of these events."""
        last = self._last[stage]
        at = [self._ready(0.0, one) for one in after]
        watched = stage == self.watched
        for stream, waits, total, events in program.stretches:
            begin = last[stream]
            for one in waits:
                if at[one] > begin:
                    begin = at[one]
            last[stream] = end = begin + total
            at.append(end)
            if watched:
                for kind, seconds in events:
                    self.spans[kind].append((begin, begin + seconds))
                    begin += seconds
        first = len(self._end)
        self._end += [at[one] for one in program.ends]
        return range(first, len(self._end))

    def _ready(self, begin: float, after: Iterable[int]) -> float:
        for one in after:
            if self._end[one] > begin:
                begin = self._end[one]
        return begin

    @property
    def step(self) -> float:
        """Seconds from the first event to the last."""
        return max((end for last in self._last.values() for end in last.values()), default=0.0)

    @property
    def busiest(self) -> int:
        """The stage that ends last."""
        return max(sorted(self._last), key=lambda stage: max(self._last[stage].values()))
