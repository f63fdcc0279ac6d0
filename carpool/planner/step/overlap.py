"""How long a ride in r chunks takes: what is done where, in which order, and what waits for what.

There are three lanes: the host, which asks for each piece in turn; the links, which carry one dispatch or combine at a
time; and the multiprocessors. A piece begins when the host has asked for it, its lane is free, and what it needs is
there. The lanes are streams of an event graph (`carpool.planner.step.events`). `chunked` lays the pieces of
`carpool.ride.chunks` into them, in that module's order:

    links       D0  D1 | C0  D2 | C1 | C2                 D dispatch, E experts, C combine
    processors       E0 |  E1 |   E2

With a host that costs nothing and dispatch and combine of equal length a, experts of length c, this is the formula
T(r) = max(2 r a, 2 a + r c, (r + 1) a + c) of pipelined MoE layers (FSMoE, arXiv 2501.10714), but for
a < c < 2 a, where the links wait once for the first chunk's experts, because no third dispatch is under way.

Runs do not ask this model how many chunks to take: they measure (`carpool.train.build.schedule_choice`).
`benchmarks/chunks.py` compares it with what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from carpool.planner.step.events import COMPUTATION, RIDES, Graph, execute


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


def chunked(pieces: Pieces, chunks: int, beside: bool = True) -> float:
    """How long a ride takes whose chunks, so many, have these pieces each.

    Args:
        beside: whether rides run beside the computation. If not, there is one lane for both."""
    graph = Graph()
    # What is asked for takes the host equally long, each.
    share = pieces.host / (4 if pieces.after else 3)
    links = RIDES if beside else COMPUTATION

    def ride(kind: str, seconds: float, *after: int) -> int:
        asked = graph.add(f"ask for {kind}", "host", share)
        return graph.add(kind, kind, seconds, (asked, *after), stream=links)

    def compute(seconds: float, after: int) -> int:
        return graph.add("experts", "experts", seconds, (graph.add("ask for experts", "host", share), after))

    came = ride("dispatch", pieces.dispatch)
    for chunk in range(chunks):
        here = came
        if chunk + 1 < chunks:
            came = ride("dispatch", pieces.dispatch)
        done = compute(pieces.experts, here)
        ride("combine", pieces.combine, done)
        if pieces.after:
            compute(pieces.after, done)
    return execute(graph).step
