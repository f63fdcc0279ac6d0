"""What published planners would choose, in the search of `carpool plan` (`carpool.planner.search.space`).

    carpool plan ... --policy alpa --policy tutel

Not here: nnScaler (Lin et al., OSDI 2024) lets people constrain the search, which any search of Carpool takes
(`carpool plan --only`). ScheMoE (Shi et al., EuroSys 2024) orders compression, exchange and decompression, which are
one event in Carpool's model of costs; FSMoE's planner chooses numbers of chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate, stage_layers
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.space import MOVES, LengthsOf, Planner
from carpool.planner.step.events import COMPUTATION, RIDES, Graph, execute
from carpool.planner.step.lengths import Lengths
from carpool.planner.step.travel import Piece

MOST_CHUNKS = 8
# Tokens of an expert that share an entry of Tutel's dictionary.
BUCKET = 128
RECOMPUTE: tuple[Mapping[str, str], ...] = ({}, {"layer_activations": "recompute", "moe_outputs": "recompute"})


# -- objectives --------------------------------------------------------------------------------------------------------


def _stages(lengths: Lengths) -> list[tuple[float, float]]:
    """(seconds, those of them in which something travels) of each stage's micro-batch, one thing after the other."""
    candidate, found = lengths.candidate, []
    share = 1.0 if candidate.data_parallel == "fsdp" else 1 / candidate.accumulation
    of_kind = {}
    for layer in lengths.shape.kinds:
        experts = lengths.experts_of_layer if layer.experts else 0.0
        reduced = [
            one._replace(seconds=share * one.seconds) for one in lengths.reductions(lengths.dense_of(layer), experts)
        ]
        gathers = [*lengths.gathers(layer)]
        of_kind[layer] = _sums([*lengths.forward(layer), *lengths.backward(layer), *gathers, *gathers, *reduced])
    for layers in stage_layers(lengths.shape, candidate.degrees):
        parts = [(number * of_kind[layer][0], number * of_kind[layer][1]) for layer, number in Counter(layers).items()]
        found.append((sum(one for one, _ in parts), sum(one for _, one in parts)))
    head = _sums([*lengths.head(False), *lengths.head(True)])
    found[-1] = found[-1][0] + head[0], found[-1][1] + head[1]
    return found


def _sums(pieces: Sequence[Piece]) -> tuple[float, float]:
    return sum(one.seconds for one in pieces), sum(one.seconds for one in pieces if one.group is not None)


def alpa(candidates: Sequence[Candidate], lengths_of: LengthsOf) -> list[Candidate]:
    """Two levels. Within stages of the same ranks, the plan that communicates least (the integer programme, section
    4.2: operators that compute much are divided by all devices in every plan, so that communication decides). Over
    stages, the least of sum(t) + (B - 1) max(t) for B micro-batches (section 5.1, equation 2). Nothing hides
    anything."""

    def level(one: Candidate) -> tuple[int, int]:
        return one.degrees.pp, one.accumulation

    chosen = []
    for _, same in groupby(sorted(candidates, key=level), level):
        # Ways to keep less come in the order of what they cost.
        times = [(one, _stages(lengths_of(one))) for one in same]
        one, stages = min(times, key=lambda pair: sum(travels for _, travels in pair[1]))
        latencies = [seconds for seconds, _ in stages]
        chosen.append((sum(latencies) + (one.accumulation - 1) * max(latencies), one))
    return [one for _, one in sorted(chosen, key=lambda pair: pair[0])]


def roofline(candidates: Sequence[Candidate], lengths_of: LengthsOf) -> list[Candidate]:
    """Operations at the device's peak, and bytes of four rides at the rate of the links, of the fullest rank: three
    times the forward's computation and four times the communication of a layer. No latencies, no passes over memory,
    no host."""

    def seconds(one: Candidate) -> tuple[float, int]:
        lengths = lengths_of(one)
        shape, hardware = lengths.shape, lengths.hardware
        peak = hardware.peak_flops or hardware.flops
        computes = shape.flops_per_token(one.sequence_length) * one.tokens / one.degrees.world_size / peak
        fullest = lengths.routes.fullest(shape.num_experts, one.degrees.ep)
        ride = lengths.ride("dispatch", "dispatch", "dispatch")
        travels = 0.0 if ride is None else 4 * (ride.seconds - ride.fixed)
        layers = sum(layer.experts for layer in shape.layers)
        return computes * fullest + one.accumulation * layers * travels, one.accumulation

    return sorted(candidates, key=seconds)


def tutel(candidates: Sequence[Candidate], lengths_of: LengthsOf) -> list[Candidate]:
    """By the capacity: each expert computes, and each ride carries, as many rows as the fullest expert has, rounded up
    to a bucket, which is the key of the dictionary. Of what is left, the shortest micro-batch per token."""

    def seconds(one: Candidate) -> float:
        lengths = lengths_of(one)
        shape = lengths.shape
        mean = one.rank_tokens * shape.top_k / shape.num_experts
        rows = mean * lengths.routes.fullest(shape.num_experts, shape.num_experts)
        routes, capacity = lengths.routes, BUCKET * math.ceil(rows / BUCKET) / mean
        padded = Lengths(
            shape, lengths.hardware, one, lengths.per_node,
            Padded(routes.chosen, routes.source, routes._found, capacity),
        )  # fmt: skip
        found = sum(seconds for seconds, _ in _stages(padded))
        if one.schedule == "chunks":
            layers = sum(layer.experts for layer in shape.layers)
            for backward in (False, True):
                cut = chunked(_part(padded, backward, one.chunks), one.chunks)
                found -= layers * (_part(padded, backward, 1).alone - cut)
        return found * one.accumulation

    return sorted(candidates, key=seconds)


@dataclass(frozen=True)
class Padded(Routes):
    """Routes by which every rank is as full as its capacity, which is over the mean load."""

    capacity: float = 1.0

    def fullest(self, num_experts: int, ranks: int) -> float:
        return self.capacity


# -- chunks ------------------------------------------------------------------------------------------------------------


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
    """How long a ride takes whose chunks, so many, have these pieces each, in the order of `carpool.ride.chunks`:

        links       D0  D1 | C0  D2 | C1 | C2                 D dispatch, E experts, C combine
        processors       E0 |  E1 |   E2

    The host asks for each piece in turn. With a host that costs nothing and dispatch and combine of equal length a,
    experts of length c, this is T(r) = max(2 r a, 2 a + r c, (r + 1) a + c) of FSMoE, but for a < c < 2 a, where the
    links wait once for the first chunk's experts. `benchmarks/chunks.py` compares it with what is measured.

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


def _part(lengths: Lengths, backward: bool, chunks: int) -> Pieces:
    """Of one of so many chunks of a layer's ride."""
    layer = next(layer for layer in lengths.shape.layers if layer.experts)
    of: dict[str, float] = dict.fromkeys(("dispatch", "experts", "combine"), 0.0)
    for piece in lengths.backward(layer) if backward else lengths.forward(layer):
        if piece.kind in of:
            of[piece.kind] += piece.of_chunk(chunks)
    return Pieces(**of)


def fsmoe(candidate: Candidate, lengths: Lengths) -> Candidate:
    """Numbers of chunks by a model in which each task takes alpha + beta n / r, forward and backward by themselves
    (section 4: the best r of the two differ, because the backward's experts take twice as long)."""
    forward, backward = (
        min(range(1, MOST_CHUNKS + 1), key=lambda r: chunked(_part(lengths, backward, r), r))
        for backward in (False, True)
    )
    return replace(candidate, chunks=forward, backward_chunks=backward)


def all_experts_apart(model: ModelShape, degrees: Degrees) -> str | None:
    """Experts over as many ranks as there are, or as many as there are experts."""
    most = math.gcd(degrees.world_size, model.num_experts)
    return None if degrees.ep == most else f"experts lie on {most} ranks"


ONE_STAGE: Mapping[str, Any] = {"pp": (1,), "tp": (1,), "cp": (1,), "etp": (1,)}
ACESO = MOVES
ALPA = Planner(
    "Zheng et al., OSDI 2022, arXiv 2201.12023, sections 4.2 and 5.1",
    "least communication within a stage, then least latency over stages; nothing is hidden",
    {"cp": (1,), "etp": (1,), "schedules": ("none",), "policies": RECOMPUTE, "optimizer_offload": ("none",)},
    order=alpa,
)
MIST = Planner(
    "Zhu et al., EuroSys 2025, arXiv 2503.19050",
    "parallelism with what any transformer may keep, compute again or offload; nothing that only experts have",
    {
        "cp": (1,),
        "etp": (1,),
        "schedules": ("none",),
        "policies": (
            *RECOMPUTE,
            {"layer_activations": "offload"},
            {"layer_activations": "offload", "expert_activations": "offload"},
        ),
    },
)
FASTERMOE = Planner(
    "He et al., PPoPP 2022, its DDL-Roofline",
    "data and expert parallelism by peak operations and bytes alone, without latencies and passes over memory",
    {**ONE_STAGE, "data_parallel": ("zero1",), "schedules": ("none",)},
    order=roofline,
)
FSMOE = Planner(
    "Pan et al., ASPLOS 2025, arXiv 2501.10714, section 4",
    "rides in chunks, as many as a linear model says, forward and backward apart",
    {"schedules": ("chunks",)},
    refine=fsmoe,
)
TUTEL = Planner(
    "Hwang et al., MLSys 2023, arXiv 2206.03382, sections 3.1 to 3.3",
    "parallelism of experts, chunks and all-to-all by the capacity, to which every expert's rows are padded",
    {
        **ONE_STAGE,
        "etp": (1, 2),
        "data_parallel": ("zero1",),
        "transports": ("alltoall", "hierarchical"),
        "schedules": ("none", "chunks"),
        "chunks": (2, 4, 8),
    },
    order=tutel,
)
BAGUALU = Planner(
    "Ma et al., PPoPP 2022, MoDa parallelism",
    "data and expert parallelism alone, experts over all nodes of the tree, rows in two hops",
    {**ONE_STAGE, "data_parallel": ("zero1",), "transports": ("hierarchical", "nvlink"), "schedules": ("none",)},
    allowed=all_experts_apart,
)
