"""Aceso's way through the space of plans: relieve what is the bottleneck, move by move (Liu et al., EuroSys 2024).

    ep8, 1 x 4     the step goes to rides            ep halved           4.1 s -> 3.2 s, taken
    ep4, 1 x 4     the step goes to experts          micro-batch doubled 3.2 s -> 2.9 s, taken
    ep4, 2 x 2     no move makes it shorter          on from the fastest place that is left: several hops in a row
                   none of `HOPS` does               the end

A place is degrees and a micro-batch; what else may vary there is few, and is tried as `plan.py` does. Each move halves
or doubles one degree. Those that relieve the kind of event to which most of the step goes come first, and the first
that makes the step shorter is taken. Where none does, the way may lead through longer steps (Aceso's hops, section
3.3): experts that share a rank need no rides, but halving `ep` once only brings more experts to a rank. Where nothing
fits, moves are those that take memory from a rank. The end is a local optimum, found by some hundred predictions
whatever the number of GPUs; enumeration finds the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import NamedTuple, Protocol

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate

Move = tuple[str, int]  # an axis or "micro_batch", and whether it is doubled (1) or halved (-1)
AXES = ("pp", "tp", "cp", "ep", "dp_replicate", "micro_batch")
EVERY: tuple[Move, ...] = tuple((axis, way) for axis in AXES for way in (1, -1))
# Places in a row that are left without a shorter step.
HOPS = 7
LESS_MEMORY: tuple[Move, ...] = (("micro_batch", -1), ("ep", 1), ("dp_replicate", -1), ("pp", 1), ("tp", 1))
# By the kind of event to which most of the step goes; the others come after these.
RELIEF: Mapping[str, tuple[Move, ...]] = MappingProxyType({
    "idle": (("pp", -1), ("micro_batch", -1)),
    "dispatch": (("ep", -1), ("micro_batch", 1)),
    "combine": (("ep", -1), ("micro_batch", 1)),
    "all-gather": (("micro_batch", 1), ("dp_replicate", 1), ("pp", 1)),
    "reduction": (("tp", -1), ("micro_batch", 1), ("ep", 1)),
    "host": (("micro_batch", 1), ("pp", 1)),
    "offload": (("ep", 1), ("pp", 1)),
})  # fmt: skip


class Place(NamedTuple):
    """Degrees, and sequences of a micro-batch."""

    degrees: Degrees
    micro_batch: int

    def size(self, axis: str) -> int:
        return self.micro_batch if axis == "micro_batch" else self.degrees.size(axis)


class Variants(Protocol):
    """Who knows what else may vary at a place, and how long its steps take (`carpool.planner.search.plan.Search`)."""

    def best_of(self, base: Candidate) -> tuple[float, Candidate] | None: ...

    def exposed(self, candidate: Candidate) -> Mapping[str, float]: ...


def relieve(places: Mapping[Place, Candidate], search: Variants, start: Place) -> Candidate | None:
    """The candidate at which no move makes the step shorter; None: moves that take memory from a rank lead to no place
    where anything fits.

    Args:
        places: all that are allowed, and a candidate of each.
        start: where to begin."""
    seen: set[Place] = set()
    at, best = start, search.best_of(places[start])
    while best is None:
        # Down in memory until something fits.
        seen.add(at)
        smaller = next((to for to in _next_to(places, at, LESS_MEMORY) if to not in seen), None)
        if smaller is None:
            return None
        at, best = smaller, search.best_of(places[smaller])
    number, hops = count(), 0
    there = [(best[0], next(number), at, best[1])]
    while there and hops <= HOPS:
        seconds, _, at, candidate = heappop(there)
        kinds = search.exposed(candidate)
        first = RELIEF.get(max(kinds, key=kinds.__getitem__), ())
        hops += 1
        for to in _next_to(places, at, tuple(dict.fromkeys((*first, *EVERY)))):
            if to in seen:
                continue
            seen.add(to)
            if (other := search.best_of(places[to])) is None:
                continue
            heappush(there, (other[0], next(number), to, other[1]))
            if other[0] < best[0]:
                best, hops = other, 0
                # What is left of this place's moves comes again if hops lead back to it.
                heappush(there, (seconds, next(number), at, candidate))
                break
    return best[1]


def _next_to(places: Mapping[Place, Candidate], at: Place, moves: tuple[Move, ...]) -> Iterator[Place]:
    """Places that differ in one axis by a factor of two, and in `fsdp` as it follows."""
    for axis, way in moves:
        wanted = at.size(axis) * 2 if way == 1 else at.size(axis) // 2
        for to in places:
            if to.size(axis) == wanted and all(
                to.size(other) == at.size(other) for other in (*AXES, "etp") if other != axis
            ):
                yield to
