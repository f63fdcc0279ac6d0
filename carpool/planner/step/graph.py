"""The event graph of one configuration's step.

    graph = step_graph(Lengths(shape, hardware, candidate, per_node=8))
    execute(graph).step                                                     seconds (`carpool.planner.step.events`)

One rank of each stage stands for all, because ranks are alike; `execute` runs the same graph over many that are not.
The order on each stream is the order in which events are added:

    computation     the layers of a micro-batch, forward and backward, as the pipeline's schedule orders them
    rides           dispatch, combine. Schedule "none": computation waits for them. "two-batch": two halves of a
                    micro-batch (or two micro-batches; in a pipeline a backward and a forward) in turns, one's ride
                    beside the other's computation
    collectives     gathers of parameters one layer ahead; reductions of gradients behind their layer
    copies          saved activations in host memory: out behind their forward, back one layer ahead
    host            asks for a layer before it runs; replayed graphs need no host but to start, stage by stage
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from carpool.parallel.schedules import SCHEDULES, rank_of
from carpool.planner.candidate import stage_layers
from carpool.planner.model.shape import LayerShape
from carpool.planner.step.clock import Clock, Program, Tape
from carpool.planner.step.events import STREAM_OF, Graph
from carpool.planner.step.lengths import HOST_ACTION, STEP_HOST, TAKEN, Lengths
from carpool.planner.step.pipelines import Action, add_pipeline, alternate, in_turns, pipeline
from carpool.planner.step.travel import Piece

_RIDE = ("dispatch", "experts", "combine")
_NOTHING = Piece("nothing", "elementwise", 0.0)  # of a stage without layers
# Layers whose offloaded tensors need no way back (`carpool.activations.offload`).
AT_HOME = 2
# Reductions for which an update waits.
LAST = 4
Bound = Literal["low", "high"]
BOUNDS: tuple[Bound | None, ...] = "low", None, "high"


def step_graph(lengths: Lengths) -> Graph:
    """All events of a step."""
    graph = Graph()
    _Builder(_Made(lengths), graph, lengths.candidate.accumulation, len(lengths.shape.layers)).build()
    return graph


class StepClock:
    """How long a configuration's step takes with some of its micro-batches and of its layers; what these have in common
    is made once."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self._made = lengths, _Made(lengths)

    def seconds(self, accumulation: int, layers: int, bound: Bound | None = None) -> float:
        """Of the first micro-batches and of the first layers, in a pipeline of each stage's.

        Args:
            bound: of all lengths at once; None: the lengths themselves."""
        return self.run(accumulation, layers, bound).step

    def run(self, accumulation: int, layers: int, bound: Bound | None = None, watched: int | None = None) -> Clock:
        """The same, as a clock that has watched a stage."""
        clock = Clock(watched)
        _Builder(self._made, clock, accumulation, layers, bound).build()
        return clock


class _Made:
    """What is the same for all micro-batches, and for layers that are alike: pieces, and programs of them."""

    def __init__(self, lengths: Lengths) -> None:
        candidate = lengths.candidate
        # Two micro-batches at once, or the halves of the only one.
        self.parts = candidate.at_once
        if self.parts > candidate.accumulation:
            half = replace(candidate, micro_batch=candidate.micro_batch / 2)  # type: ignore[arg-type]
            lengths = Lengths(lengths.shape, lengths.hardware, half, lengths.per_node, lengths.routes)
        self.lengths = lengths
        self.forward, self.backward = cache(lambda layer: tuple(lengths.forward(layer))), cache(self._backward_pieces)
        self.gathers = cache(lambda layer: tuple(lengths.gathers(layer)))
        self.reductions = cache(lambda dense, experts: tuple(lengths.reductions(dense, experts)))
        self.offloaded, self.host = cache(lengths.offloaded), cache(lengths.host)
        self.programs: dict[Any, Program] = {}
        self.chunks: dict[Any, int] = {}  # of what a chunk of the pipeline has, a number

    def _backward_pieces(self, layer: LayerShape, kind: str = "B") -> tuple[Piece, ...]:
        """Of a whole backward; of an I or a W, half of each product, and I has everything else."""
        pieces = tuple(self.lengths.backward(layer))
        if kind == "B":
            return pieces
        halves = ("dense", "experts")
        kept = [piece for piece in pieces if kind == "I" or piece.kind in halves]
        return tuple(
            piece._replace(seconds=piece.seconds / 2, fixed=piece.fixed / 2) if piece.kind in halves else piece
            for piece in kept
        )


class At(NamedTuple):
    """Of what an event is a part.

    Attributes:
        where: "layers.3", as the profiler's ranges have it.
        phase: "forward", "backward" or "update".
        stage, layer, number: stage of the pipeline, layer of the model, micro-batch.
    """

    where: str
    phase: str
    stage: int
    layer: int | None
    number: int


class _Builder:
    """Adds the events of a step with so many micro-batches and of the first layers, so many."""

    def __init__(
        self, made: _Made, graph: Graph | Clock, accumulation: int, num_layers: int, bound: Bound | None = None
    ) -> None:
        self.made, self.lengths, self.parts = made, made.lengths, made.parts
        self.candidate = candidate = made.lengths.candidate
        self.degrees = candidate.degrees
        self.number = max(1, accumulation // self.parts)
        self.graph: Any = graph  # a Graph, a Clock or a Tape
        self.bound = bound
        self.last_of: dict[int, int] = {}  # the last event of each rank
        in_chunks = candidate.schedule == "chunks"
        self.chunks = candidate.chunks if in_chunks else 1
        self.backward_chunks = self.chunks if candidate.backward_chunks is None else candidate.backward_chunks
        pipeline = self.candidate.pipeline if self.degrees.pp > 1 else "1F1B"
        self.pipeline, self.each = pipeline, SCHEDULES[pipeline].stages
        # A rank of some schedules has two stages of the pipeline, one in each half of the model.
        shape = made.lengths.shape
        if self.degrees.pp > 1:
            # Each stage has equally many fewer.
            fewer = (len(shape.layers) - num_layers) // (self.degrees.pp * self.each)
            self.stages = stage_layers(shape, self.degrees, self.each, fewer)
        else:
            self.stages = [shape.layers[:num_layers]]
        self.rank_of = [rank_of(pipeline, self.degrees.pp, stage) for stage in range(len(self.stages))]
        self.first = [sum(len(one) for one in self.stages[:stage]) for stage in range(len(self.stages))]
        # The same number for chunks that are alike.
        kinds = [(layers, stage == len(self.stages) - 1) for stage, layers in enumerate(self.stages)]
        self.alike = [made.chunks.setdefault(kind, len(made.chunks)) for kind in kinds]
        self.reduced: dict[int, list[int]] = {}
        # FSDP reduces the gradients of every micro-batch, but over copies of the model.
        self.reduced_last = candidate.data_parallel != "fsdp" or self.degrees.dp_replicate > 1
        self.forward, self.backward, self.gathers = made.forward, made.backward, made.gathers
        self.reductions, self.offloaded, self.host = made.reductions, made.offloaded, made.host

    def build(self) -> None:
        """Add all events."""
        for stage in range(self.degrees.pp):
            self.last_of[stage] = self.graph.add(
                "step::host", "host", STEP_HOST, stage=stage, fixed=STEP_HOST, stream="computation"
            )
        found = pipeline(self.pipeline, self.degrees.pp, self.number, self.each, self.candidate.paired)
        send = self._send_seconds()
        if isinstance(self.graph, Clock):
            add_pipeline(self.graph, found, self._replayed, send)
        else:
            add_pipeline(self.graph, found, self._at_once, send)
        for rank in range(self.degrees.pp):
            self._update(rank)

    def _send_seconds(self) -> float:
        """Of a micro-batch's activations to the next stage."""
        lengths, hardware = self.lengths, self.lengths.hardware
        between = self.degrees.stage_size >= lengths.per_node
        rate = hardware.network if between else hardware.rate(hardware.node_link)
        return rate.latency + lengths.tokens * lengths.shape.hidden * lengths.element / rate.bytes_per_second

    def _add(self, piece: Piece, at: At, after: Sequence[int]) -> int:
        rank = self.rank_of[at.stage]
        if not isinstance(self.graph, Graph):
            seconds = piece.seconds if self.bound is None else piece.seconds * getattr(piece, self.bound)
            event = self.graph.record(piece.stream or STREAM_OF[piece.kind], piece.kind, seconds, after, rank)
        else:
            event = self.graph.add(
                f"{at.where}::{at.phase}::{piece.name}", piece.kind, piece.seconds, after, stream=piece.stream,
                low=piece.seconds * piece.low, high=piece.seconds * piece.high, fixed=piece.fixed, layer=at.layer,
                phase=at.phase, stage=rank, micro_batch=at.number, group=piece.group,
            )  # fmt: skip
        self.last_of[rank] = event
        return event

    def _replayed(
        self, clock: Clock, actions: tuple[Action, ...], stage: int, after: list[tuple[int, ...]]
    ) -> Sequence[int]:
        """Of what a stage does at once: micro-batches differ in whether gradients are reduced after their backward."""
        last, late = self.number - 1 if self.reduced_last else None, self.candidate.writes_experts_late
        key = (
            self.bound,
            *(
                (kind, self.alike[chunk], number == (last if kind != "F" else 0 if late else None))
                for kind, chunk, number in actions
            ),
        )
        if key not in self.made.programs:
            self.made.programs[key] = self._recorded(actions, stage)
        *ends, self.last_of[stage] = clock.run(self.made.programs[key], stage, after)
        own = len(actions)
        self.reduced.setdefault(stage, []).extend(ends[own:])
        return ends[:own]

    def _recorded(self, actions: tuple[Action, ...], stage: int) -> Program:
        """Ends: of each action, of the last reductions, and of what came last."""
        own, tape = copy(self), Tape(len(actions))
        own.graph, own.last_of, own.reduced = tape, {}, {}
        ends = own._at_once(tape, actions, stage, [(place,) for place in range(len(actions))])
        return tape.program([*ends, *own.reduced.get(stage, ())[-LAST:], own.last_of[stage]])

    def _at_once(
        self, graph: Any, actions: tuple[Action, ...], stage: int, after: list[tuple[int, ...]]
    ) -> Sequence[int]:
        """Adds what a stage does at once, one action or a pair. Returns the last event of each action."""
        overlapped = self.parts == 2 or len(actions) == 2
        return in_turns(partial(self._work, overlapped))(graph, actions, stage, after)

    def _work(self, overlapped: bool, graph: Any, action: Action, stage: int, after: tuple[int, ...]) -> Iterator[int]:
        """Adds one micro-batch of the pipeline, or both halves. `overlapped`: something computes while its rides are
        under way."""
        if self.degrees.pp > 1:
            piece = Piece("host", "host", HOST_ACTION, 0.5, 2.0)
            phase = "forward" if action.kind == "F" else "backward"
            asked = self._add(piece, At(f"chunks.{action.chunk}", phase, action.chunk, None, action.micro_batch), ())
            after = (*after, asked)

        def make(number: int) -> Iterator[int]:
            if action.kind == "F":
                return self._forward(action.chunk, number, after, overlapped)
            return self._backward(action.chunk, number, after, overlapped, action.kind)

        if self.parts == 1:
            yield from make(action.micro_batch)
            return
        ends = [0, 0]

        def told(part: int) -> Iterator[int]:
            for event in make(2 * action.micro_batch + part):
                ends[part] = event
                yield event

        yield from alternate(told(0), told(1))
        yield self.graph.add("both", "elementwise", 0.0, tuple(ends), stage=stage)

    def _forward(self, stage: int, number: int, after: tuple[int, ...], overlapped: bool) -> Iterator[int]:
        layers, outside = self.stages[stage], At("head", "forward", stage, None, number)
        last = after
        free = [after, after]
        asked: tuple[int, ...] = ()
        synced: tuple[int, ...] = ()
        for i, layer in enumerate(layers, self.first[stage]):
            at = At(f"layers.{i}", "forward", stage, i, number)
            asked = self._host(at, (*asked, *synced))
            # One layer ahead: when the layer before the previous one is done.
            gathered = [self._add(piece, at, free[-2]) for piece in self.gathers(layer)]
            if number == 0 and (written := self.lengths.written_late(layer)) is not None:
                gathered.append(self._add(written, at, after))
            for piece in self.forward(layer):
                if piece.kind == "dispatch" and self.candidate.waits:
                    # The host learns how many rows travel, and asks for nothing more until then.
                    synced = last
                if self.chunks > 1 and piece.kind in _RIDE:
                    continue
                last = (self._add(piece, at, (*last, *asked, *gathered)),)
                if overlapped:
                    self._slow_beside(piece, at)
                yield last[0]
            if self.chunks > 1 and layer.experts:
                last = self._ride_in_chunks(self.forward(layer), self.chunks, at, last)
                yield last[0]
            free.append(last)
            if (copies := self.offloaded(layer)) is not None:
                self._add(copies, at, last)
        if stage == len(self.stages) - 1:
            for piece in self.lengths.head(False):
                last = (self._add(piece, outside, last),)
                yield last[0]
        if not layers:
            yield self._add(_NOTHING, outside._replace(where="stage"), last)

    def _backward(
        self, stage: int, number: int, after: tuple[int, ...], overlapped: bool, kind: str = "B"
    ) -> Iterator[int]:
        layers, lengths, outside = self.stages[stage], self.lengths, At("head", "backward", stage, None, number)
        last = after
        final = number >= self.number * self.parts - self.parts
        reduces = final or self.candidate.data_parallel == "fsdp"
        free = [after, after]
        # Where a forward's own backward follows at once, what the last layers save has not left the device yet.
        at_home = AT_HOME if len(self.stages) == 1 else 0
        asked: tuple[int, ...] = ()
        if stage == len(self.stages) - 1 and kind != "W":
            for piece in lengths.head(True):
                last = (self._add(piece, outside, last),)
                yield last[0]
            if reduces:
                self._reduce(lengths.embeddings / (1 if lengths.shape.tied else 2), 0, outside, last)
        for i in reversed(range(len(layers))):
            layer, at = (
                layers[i],
                At(f"layers.{self.first[stage] + i}", "backward", stage, self.first[stage] + i, number),
            )
            asked = self._host(at, asked)
            again = () if kind == "W" else self.gathers(layer)
            gathered = [self._add(piece, at, free[-2]) for piece in again]
            back = kind != "W" and i < len(layers) - at_home
            if back and (copies := self.offloaded(layer)) is not None:
                gathered.append(self._add(copies, at, free[-2]))
            ridden = (chunks := self.backward_chunks) == 1
            for piece in self.backward(layer, kind):
                before = (*last, *asked, *gathered)
                if chunks > 1 and piece.kind in _RIDE:
                    if not ridden:
                        last = self._ride_in_chunks(self.backward(layer, kind), chunks, at, before)
                        ridden = True
                        yield last[0]
                    continue
                last = (self._add(piece, at, before),)
                if overlapped:
                    self._slow_beside(piece, at)
                yield last[0]
            if reduces and kind != "I":
                dense, experts = lengths.dense_of(layer), lengths.experts_of_layer if layer.experts else 0.0
                taken = self._reduce(dense, experts, at, last)
                if (
                    self.candidate.optimizer_in_backward
                    and (state := lengths.streamed_state(dense, experts)) is not None
                ):
                    # Of a layer whose gradients are there, beside the backward of the layers below.
                    self._add(state, at, last)
                if taken:
                    last = (self._add(Piece("beside reductions", "elementwise", TAKEN * taken), at, last),)
                    yield last[0]
            free.append(last)
        if not layers:
            yield self._add(_NOTHING, outside._replace(where="stage"), last)

    def _slow_beside(self, piece: Piece, at: At) -> None:
        """Work beside a ride lacks the multiprocessors that carry the ride. Matrix products of pairs, and of backwards
        of two batches, leave these free all the time (`carpool.kernels.device.reserved`)."""
        free = self.parts == 1 or at.phase == "backward"
        slow = ("experts", "dense") if free else ("dispatch", "combine")
        if self.degrees.expert_ranks > 1 and piece.kind in slow:
            kind = piece.kind if free else "elementwise"
            self._add(Piece("beside rides", kind, TAKEN * piece.seconds, piece.low, piece.high), at, ())

    def _ride_in_chunks(
        self, pieces: tuple[Piece, ...], chunks: int, at: At, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """A dispatch, experts and a combine for each chunk; the next dispatch is asked for before a chunk's experts."""
        of: dict[str, Piece] = {}
        for piece in pieces:
            if piece.kind in _RIDE:
                # Rows that are sent again, and rides that are repeated, take their time beside.
                earlier = of[piece.kind].seconds if piece.kind in of else 0.0
                of[piece.kind] = piece._replace(seconds=earlier + piece.of_chunk(chunks))

        def add(kind: str, after: tuple[int, ...]) -> tuple[int, ...]:
            return (self._add(of[kind], at, after),) if kind in of else after

        came, last = [add("dispatch", after)], after
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                came.append(add("dispatch", after))
            last = add("combine", add("experts", came[chunk]))
        return last

    def _host(self, at: At, after: tuple[int, ...]) -> tuple[int, ...]:
        seconds = self.host(at.phase == "backward")
        return (self._add(Piece("host", "host", seconds, 0.8, 1.25), at, after),) if seconds else ()

    def _reduce(self, dense: float, experts: float, at: At, after: tuple[int, ...]) -> float:
        """Add reductions; returns their seconds."""
        taken = 0.0
        for piece in self.reductions(dense, experts):
            if piece.name == "copies" and at.number < self.number * self.parts - self.parts:
                continue
            self.reduced.setdefault(self.rank_of[at.stage], []).append(self._add(piece, at, after))
            taken += piece.seconds
        return taken

    def _update(self, stage: int) -> None:
        """`stage`: the first one of a rank, which has its number."""
        lengths, own_stages = self.lengths, [i for i, rank in enumerate(self.rank_of) if rank == stage]
        layers = tuple(layer for i in own_stages for layer in self.stages[i])
        ends = (0 in own_stages) + (len(self.stages) - 1 in own_stages)
        dense, experts = lengths.parameters(layers, ends)
        last = (self.last_of[stage],)
        before = (*self.reduced.get(stage, ())[-LAST:], *last)
        if stage == 0:
            # The embedding's gradient comes last.
            size = lengths.embeddings / 2 if not lengths.shape.tied else 0.0
            self._reduce(size, 0.0, At("embedding", "backward", stage, None, self.number * self.parts), last)
            before += tuple(self.reduced.get(stage, ())[-2:])
        for piece in lengths.update(dense, experts, layers):
            before = (self._add(piece, At("step", "update", stage, None, 0), before),)
