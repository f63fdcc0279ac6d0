"""How long a ride in r chunks takes: what is done where, in which order, and what waits for what.

There are three lanes: the host, which asks for each piece in turn; the links, which carry one dispatch or combine at a
time; and the multiprocessors. A piece begins when the host has asked for it, its lane is free, and what it needs is
there. `chunked` lays the pieces of `carpool.schedule.chunks` into these lanes, in that module's order:

    links       D0  D1 | C0  D2 | C1 | C2                 D dispatch, E experts, C combine
    processors       E0 |  E1 |   E2

With a host that costs nothing and dispatch and combine of equal length a, experts of length c, this is the formula
T(r) = max(2 r a, 2 a + r c, (r + 1) a + c) of pipelined MoE layers (FSMoE, arXiv 2501.10714), but for
a < c < 2 a, where the links wait once for the first chunk's experts, because no third dispatch is under way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

LEAST_GAIN = 0.02  # less is in the noise of a measurement, and in what a model leaves out
Way = TypeVar("Way")


@dataclass(frozen=True)
class Pieces:
    """Durations of one chunk's pieces, in any unit of time.

    Attributes:
        dispatch, combine: on the links.
        experts: on the multiprocessors, before the combine.
        after: the same, after the combine has been asked for: the delayed weight gradient of the backward.
        host: what the host needs to ask for all of them.
    """

    dispatch: float
    experts: float
    combine: float
    after: float = 0.0
    host: float = 0.0

    @property
    def alone(self) -> float:
        """One after the other, with a host that is ahead."""
        return self.dispatch + self.experts + self.combine + self.after


def chunked(pieces: Pieces, chunks: int, beside: bool = True, parts: int = 1) -> float:
    """How long a ride takes whose chunks, so many, have these pieces each.

    Args:
        beside: whether rides run beside the computation. If not, there is one lane for both.
        parts: of a chunk, in which the experts compute; `experts`, `after` and `host` are of one.
    """
    asked = links = processors = 0.0
    # A part's share of the host for each that is asked for; a chunk's rides are asked for with each of its parts.
    share = pieces.host / (4 if pieces.after else 3)

    def ride(duration: float, after: float) -> float:
        nonlocal asked, links, processors
        asked += share * parts
        if not beside:
            links = processors
        links = max(links, asked, after) + duration
        if not beside:
            processors = links
        return links

    def compute(duration: float, after: float) -> float:
        nonlocal asked, processors
        asked += share
        processors = max(processors, asked, after) + duration
        return processors

    came = [ride(pieces.dispatch, 0.0)]
    last = 0.0
    for chunk in range(chunks):
        if chunk + 1 < chunks:
            came.append(ride(pieces.dispatch, 0.0))
        for part in range(parts):
            done = compute(pieces.experts, came[chunk])
            if part == parts - 1:
                last = ride(pieces.combine, done)
            if pieces.after:
                compute(pieces.after, done)
    return max(last, processors)


def best_chunks(pieces: Mapping[int, Iterable[Pieces]], beside: bool = True) -> tuple[int, dict[int, float]]:
    """The number of chunks that takes least, as `fastest` decides.

    Args:
        pieces: for each number of chunks, what a chunk of that size consists of, in the forward and in the backward.

    Returns:
        It, and the time of each.
    """
    times = {r: sum(chunked(one, r, beside) for one in pieces[r]) for r in sorted(pieces)}
    return fastest(times), times


def best_pair(
    pieces: Mapping[int, tuple[Pieces, Pieces]], beside: bool = True
) -> tuple[tuple[int, int], dict[tuple[int, int], float]]:
    """The numbers of chunks of the forward and of the backward that take least together, as `fastest` decides.

    Experts compute on parts, of which both are multiples (`carpool.schedule.chunks`): so it is not two questions.

    Args:
        pieces: for each number of chunks, what a chunk of that size consists of, in the forward and in the backward.

    Returns:
        Them, and the time of each pair whose parts are of a known size; fewer parts come first.
    """
    times: dict[tuple[int, int], float] = {}
    for pair in sorted(itertools.product(pieces, pieces), key=lambda pair: (math.lcm(*pair), pair)):
        if (parts := math.lcm(*pair)) in pieces:
            times[pair] = sum(
                chunked(
                    replace(pieces[parts][way], dispatch=pieces[r][way].dispatch, combine=pieces[r][way].combine),
                    r, beside, parts // r,
                )
                for way, r in enumerate(pair)
            )  # fmt: skip
    return fastest(times), times


def fastest(times: Mapping[Way, float]) -> Way:
    """The fastest, where each must be `LEAST_GAIN` faster than the best before it: those that cost more come later."""
    ways = iter(times)
    best = next(ways)
    for way in ways:
        if times[way] < times[best] * (1 - LEAST_GAIN):
            best = way
    return best


def between(sizes: Mapping[int, Pieces]) -> Callable[[float], Pieces]:
    """Pieces of any size, from those of two or more sizes: straight lines between neighbours, and beyond the ends.

    Raises:
        ValueError: fewer than two sizes."""
    known = sorted(sizes)
    if len(known) < 2:
        raise ValueError(f"pieces of {len(known)} sizes are known; two or more are needed")

    def of(size: float) -> Pieces:
        upper = next((i for i in range(1, len(known) - 1) if size <= known[i]), len(known) - 1)
        low, high = known[upper - 1], known[upper]
        share = (size - low) / (high - low)
        one, other = vars(sizes[low]), vars(sizes[high])
        return Pieces(**{name: max(0.0, one[name] + share * (other[name] - one[name])) for name in one})

    return of
