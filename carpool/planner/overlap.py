"""How long a ride in r chunks takes: what is done where, in which order, and what waits for what.

There are three lanes: the host, which asks for each piece in turn; the links, which carry one dispatch or combine at a
time; and the multiprocessors. A piece begins when the host has asked for it, its lane is free, and what it needs is
there. `chunked` lays the pieces of `carpool.schedule.chunks` into these lanes, in that module's order:

    links       D0  D1 | C0  D2 | C1 | C2                 D dispatch, E experts, C combine
    processors       E0 |  E1 |   E2

With a host that costs nothing and dispatch and combine of equal length a, experts of length c, this is the formula
T(r) = max(2 r a, 2 a + r c, (r + 1) a + c) of pipelined MoE layers (FSMoE, arXiv 2501.10714), but for
a < c < 2 a, where the links wait once for the first chunk's experts, because no third dispatch is under way.

Runs do not ask this model how many chunks to take: they measure (`carpool.train.run.schedules`). `benchmarks/chunks.py`
compares it with what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass


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
