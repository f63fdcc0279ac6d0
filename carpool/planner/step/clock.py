"""When the events of one rank a stage end, without the events themselves: a search asks for thousands of steps.

    clock = Clock()
    clock.add("a", "attention", 2.0)          the calls of a `Graph`, run at once
    clock.step                                2.0

What a step does again for each micro-batch is recorded once, and then run many times:

    tape = Tape(inputs=1)                                     numbers 0, 1, ... are events from outside
    a = tape.add("a", "attention", 2.0, (0,))
    b = tape.add("b", "dense", 1.0, (a, 0))
    c = tape.add("c", "dispatch", 3.0, (b,))
    program = tape.program([c])                               computation: 2.0 and 1.0, after 0; rides: 3.0, after these
    (end,) = clock.run(program, stage=0, after=[(first,)])

A program leaves out what other waits imply, and takes events of a stream together that nobody else waits for. Every
length is still added to the same number in the same order, so that a program gives the sums of its graph to the last
digit.
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
        seconds: of each.
    """

    stream: str
    waits: tuple[int, ...]
    seconds: list[float]


class Program(NamedTuple):
    """Recorded events of one stage.

    Attributes:
        stretches: in an order in which each comes after all that it waits for.
        ends: whose ends are wanted, by number.
    """

    stretches: tuple[Stretch, ...]
    ends: tuple[int, ...]


class Tape:
    """Records events of one stage; takes the calls of a `Graph`.

    Args:
        inputs: events from outside, which are numbers 0, 1, ... here."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._order: list[tuple[str, tuple[int, ...]]] = []
        self._seconds: list[float] = []

    def add(
        self, name: str, kind: str, seconds: float, after: Iterable[int] = (), *, stream: str | None = None, **more: Any
    ) -> int:
        """As `Graph.add`; all events are of one stage."""
        return self.record(stream or STREAM_OF[kind], seconds, tuple(after))

    def record(self, stream: str, seconds: float, after: tuple[int, ...], stage: int = 0) -> int:
        """The same, sooner."""
        assert seconds >= 0, f"an event on {stream} takes {seconds} s"
        self._order.append((stream, after))
        self._seconds.append(seconds)
        return self._inputs + len(self._order) - 1

    def program(self, ends: Sequence[int]) -> Program:
        """What was recorded.

        Args:
            ends: events whose ends are wanted."""
        found = _layout(self._inputs, tuple(self._order), tuple(ends))
        stretches = [Stretch(stream, waits, []) for stream, waits in found.stretches]
        for at, seconds in zip(found.place, self._seconds, strict=True):
            if seconds:
                stretches[at].seconds.append(seconds)
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
    """A `Graph` that is run as it is built, one rank for each stage."""

    def __init__(self) -> None:
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
        return self.record(stream or STREAM_OF[kind], seconds, after, stage)

    def record(self, stream: str, seconds: float, after: Iterable[int], stage: int = 0) -> int:
        """The same, sooner."""
        last = self._last[stage]
        last[stream] = end = self._ready(last[stream], after) + seconds
        self._end.append(end)
        return len(self._end) - 1

    def run(self, program: Program, stage: int, after: Iterable[Iterable[int]]) -> Sequence[int]:
        """Add the events of a program, and return the numbers of those whose ends it is to tell.

        Args:
            after: of each input of the program, what it stands for: the last of these events."""
        last = self._last[stage]
        at = [self._ready(0.0, one) for one in after]
        for stream, waits, lengths in program.stretches:
            begin = last[stream]
            for one in waits:
                if at[one] > begin:
                    begin = at[one]
            for seconds in lengths:
                begin += seconds
            last[stream] = begin
            at.append(begin)
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
