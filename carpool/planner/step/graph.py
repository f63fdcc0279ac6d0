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
    copies          what layers keep in host memory: out behind their forward, back one layer ahead
    host            asks for a layer before it runs; replayed graphs need no host but to start, stage by stage
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from carpool.parallel.schedules import SCHEDULES, rank_of
from carpool.planner.configuration.stages import stage_layers
from carpool.planner.model.shape import LayerShape
from carpool.planner.step.events import Clock, Graph
from carpool.planner.step.lengths import HOST_ACTION, STEP_HOST, TAKEN, Lengths
from carpool.planner.step.pipelines import Action, add_pipeline, alternate, orders
from carpool.planner.step.travel import Piece

_RIDE = ("dispatch", "experts", "combine")
# Layers whose offloaded tensors need no way back (`carpool.memory.offload`).
AT_HOME = 2


def step_graph(lengths: Lengths) -> Graph:
    """All events of a step."""
    graph = Graph()
    add_step(graph, lengths)
    return graph


def add_step(graph: Graph | Clock, lengths: Lengths) -> None:
    """Add all events of a step to a graph, or to a clock, which runs them at once."""
    _Builder(lengths, graph).build()


class _Builder:
    def __init__(self, lengths: Lengths, graph: Graph | Clock) -> None:
        self.candidate = candidate = lengths.candidate
        self.degrees = candidate.degrees
        # Two micro-batches at once, or the halves of the only one.
        self.parts = candidate.at_once
        if self.parts > candidate.accumulation:
            half = replace(candidate, micro_batch=candidate.micro_batch / 2)  # type: ignore[arg-type]
            lengths = Lengths(lengths.shape, lengths.hardware, half, lengths.per_node, lengths.routes)
        self.lengths, self.number = lengths, max(1, candidate.accumulation // self.parts)
        self.graph = graph
        self.last_of: dict[int, int] = {}  # the last event of each rank
        in_chunks = candidate.schedule == "chunks"
        self.chunks = candidate.chunks if in_chunks else 1
        self.backward_chunks = self.chunks if candidate.backward_chunks is None else candidate.backward_chunks
        pipeline = self.candidate.pipeline if self.degrees.pp > 1 else "1F1B"
        self.pipeline, self.each = pipeline, SCHEDULES[pipeline].stages
        # Whether something computes while rides are under way.
        self.beside = self.parts == 2 or candidate.paired
        # A rank of some schedules has two stages of the pipeline, one in each half of the model.
        self.stages = stage_layers(lengths.shape, self.degrees, self.each)
        self.rank_of = [rank_of(pipeline, self.degrees.pp, stage) for stage in range(len(self.stages))]
        self.first = [sum(len(one) for one in self.stages[:stage]) for stage in range(len(self.stages))]
        self.reduced: dict[int, list[int]] = {}
        self.forward, self.backward = cache(self._forward_pieces), cache(self._backward_pieces)
        self.gathers = cache(lambda layer: tuple(lengths.gathers(layer)))
        self.reductions = cache(lambda dense, experts: tuple(lengths.reductions(dense, experts)))
        self.offloaded, self.host = cache(lengths.offloaded), cache(lengths.host)

    def _forward_pieces(self, layer: LayerShape) -> tuple[Piece, ...]:
        return tuple(self.lengths.forward(layer))

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

    def build(self) -> None:
        """Add all events."""
        for stage in range(self.degrees.pp):
            self.last_of[stage] = self.graph.add(
                "step::host", "host", STEP_HOST, stage=stage, fixed=STEP_HOST, stream="computation"
            )
        found = orders(self.pipeline, self.degrees.pp, self.number, self.each, self.candidate.paired)
        send = self._send_seconds()
        add_pipeline(self.graph, self.pipeline, self.degrees.pp, found, self._work, send)
        for rank in range(self.degrees.pp):
            self._update(rank)

    def _send_seconds(self) -> float:
        """Of a micro-batch's activations to the next stage."""
        lengths, hardware = self.lengths, self.lengths.hardware
        between = self.degrees.stage_size >= lengths.per_node
        rate = hardware.network if between else hardware.rate("nvlink")
        return rate.latency + lengths.tokens * lengths.shape.hidden * lengths.element / rate.bytes_per_second

    def _add(
        self, piece: Piece, where: str, phase: str, after: tuple[int, ...], stage: int, layer: int | None, number: int
    ) -> int:
        rank = self.rank_of[stage]
        name = f"{where}::{phase}::{piece.name}"
        self.last_of[rank] = event = self.graph.add(
            name, piece.kind, piece.seconds, after, stream=piece.stream, low=piece.seconds * piece.low,
            high=piece.seconds * piece.high, fixed=piece.fixed, layer=layer, phase=phase,
            stage=rank, micro_batch=number, group=piece.group,
        )  # fmt: skip
        return event

    def _work(self, graph: Graph | Clock, action: Action, stage: int, after: tuple[int, ...]) -> Iterator[int]:
        """Of one micro-batch of the pipeline, or of both halves."""
        if self.degrees.pp > 1:
            piece = Piece("host", "host", HOST_ACTION, 0.5, 2.0)
            phase = "forward" if action.kind == "F" else "backward"
            asked = self._add(piece, f"chunks.{action.chunk}", phase, (), action.chunk, None, action.micro_batch)
            after = (*after, asked)

        def make(number: int) -> Iterator[int]:
            if action.kind == "F":
                return self._forward(action.chunk, number, after)
            return self._backward(action.chunk, number, after, action.kind)

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

    def _forward(self, stage: int, number: int, after: tuple[int, ...]) -> Iterator[int]:
        layers = self.stages[stage]
        last = after
        free = [after, after]
        asked: tuple[int, ...] = ()
        synced: tuple[int, ...] = ()
        for i, layer in enumerate(layers):
            where, at = f"layers.{self.first[stage] + i}", self.first[stage] + i
            asked = self._host(where, False, (*asked, *synced), stage, at, number)
            # One layer ahead: when the layer before the previous one is done.
            gathered = [self._add(p, where, "forward", free[-2], stage, at, number) for p in self.gathers(layer)]
            for piece in self.forward(layer):
                if piece.kind == "dispatch" and self.candidate.waits:
                    # The host learns how many rows travel, and asks for nothing more until then.
                    synced = last
                if self.chunks > 1 and piece.kind in _RIDE:
                    continue
                event = self._add(piece, where, "forward", (*last, *asked, *gathered), stage, at, number)
                self._slow_beside(piece, where, "forward", stage, at, number)
                last = (event,)
                yield event
            if self.chunks > 1 and layer.experts:
                last = self._ride_in_chunks(self.forward(layer), self.chunks, where, "forward", last, stage, at, number)
                yield last[0]
            free.append(last)
            if (copies := self.offloaded(layer)) is not None:
                self._add(copies, where, "forward", last, stage, at, number)
        if stage == len(self.stages) - 1:
            for piece in self.lengths.head(False):
                last = (self._add(piece, "head", "forward", last, stage, None, number),)
                yield last[0]
        if not layers:
            yield self._nothing("forward", last, stage, number)

    def _backward(self, stage: int, number: int, after: tuple[int, ...], kind: str = "B") -> Iterator[int]:
        layers, lengths = self.stages[stage], self.lengths
        last = after
        final = number >= self.number * self.parts - self.parts
        reduces = final or self.candidate.dense == "fsdp"
        free = [after, after]
        # Where a forward's own backward follows at once, what the last layers keep has not left the device yet.
        at_home = AT_HOME if len(self.stages) == 1 else 0
        asked: tuple[int, ...] = ()
        if stage == len(self.stages) - 1 and kind != "W":
            for piece in lengths.head(True):
                last = (self._add(piece, "head", "backward", last, stage, None, number),)
                yield last[0]
            if reduces:
                self._reduce(
                    lengths.embeddings / (1 if lengths.shape.tied else 2), 0, "head", last, stage, None, number
                )
        for i in reversed(range(len(layers))):
            layer, at = layers[i], self.first[stage] + i
            where = f"layers.{at}"
            asked = self._host(where, True, asked, stage, at, number)
            again = () if kind == "W" else self.gathers(layer)
            gathered = [self._add(p, where, "backward", free[-2], stage, at, number) for p in again]
            back = kind != "W" and i < len(layers) - at_home
            if back and (copies := self.offloaded(layer)) is not None:
                gathered.append(self._add(copies, where, "backward", free[-2], stage, at, number))
            ridden = (chunks := self.backward_chunks) == 1
            for piece in self.backward(layer, kind):
                if chunks > 1 and piece.kind in _RIDE:
                    if not ridden:
                        before = (*last, *asked, *gathered)
                        last = self._ride_in_chunks(
                            self.backward(layer, kind), chunks, where, "backward", before, stage, at, number
                        )
                        ridden = True
                        yield last[0]
                    continue
                event = self._add(piece, where, "backward", (*last, *asked, *gathered), stage, at, number)
                self._slow_beside(piece, where, "backward", stage, at, number)
                last = (event,)
                yield event
            if reduces and kind != "I":
                experts = lengths.experts_of_layer if layer.experts else 0.0
                taken = self._reduce(lengths.dense_of(layer), experts, where, last, stage, at, number)
                if self.candidate.gradients == "consumed":
                    self._stream_state(lengths.dense_of(layer), experts, where, last, stage, at, number)
                if taken:
                    slower = Piece("beside reductions", "elementwise", TAKEN * taken)
                    last = (self._add(slower, where, "backward", last, stage, at, number),)
                    yield last[0]
            free.append(last)
        if not layers:
            yield self._nothing("backward", last, stage, number)

    def _nothing(self, phase: str, last: tuple[int, ...], stage: int, number: int) -> int:
        """Of a stage without layers: what whoever waits for it waits for."""
        return self._add(Piece("nothing", "elementwise", 0.0), "stage", phase, last, stage, None, number)

    def _slow_beside(self, piece: Piece, where: str, phase: str, stage: int, layer: int, number: int) -> None:
        """What computes beside a ride lacks the multiprocessors that carry it."""
        if self.beside and piece.kind in ("dispatch", "combine"):
            slower = Piece("beside rides", "elementwise", TAKEN * piece.seconds, piece.low, piece.high)
            self._add(slower, where, phase, (), stage, layer, number)

    def _ride_in_chunks(
        self,
        pieces: tuple[Piece, ...],
        chunks: int,
        where: str,
        phase: str,
        after: tuple[int, ...],
        stage: int,
        layer: int,
        number: int,
    ) -> tuple[int, ...]:
        """A dispatch, experts and a combine for each chunk; the next dispatch is asked for before a chunk's experts."""
        of: dict[str, Piece] = {}
        for piece in pieces:
            if piece.kind in _RIDE:
                # Rows that are sent again, and rides that are repeated, take their time beside.
                earlier = of[piece.kind].seconds if piece.kind in of else 0.0
                of[piece.kind] = piece._replace(seconds=earlier + piece.of_chunk(chunks))

        def add(kind: str, after: tuple[int, ...]) -> tuple[int, ...]:
            return (self._add(of[kind], where, phase, after, stage, layer, number),) if kind in of else after

        came, last = [add("dispatch", after)], after
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                came.append(add("dispatch", after))
            last = add("combine", add("experts", came[chunk]))
        return last

    def _host(
        self, where: str, backward: bool, after: tuple[int, ...], stage: int, layer: int, number: int
    ) -> tuple[int, ...]:
        seconds = self.host(backward)
        if not seconds:
            return ()
        phase = "backward" if backward else "forward"
        return (self._add(Piece("host", "host", seconds, 0.8, 1.25), where, phase, after, stage, layer, number),)

    def _reduce(
        self,
        dense: float,
        experts: float,
        where: str,
        after: tuple[int, ...],
        stage: int,
        layer: int | None,
        number: int,
    ) -> float:
        """Add reductions; returns their seconds."""
        taken = 0.0
        for piece in self.reductions(dense, experts):
            if piece.name == "copies" and number < self.number * self.parts - self.parts:
                continue
            event = self._add(piece, where, "backward", after, stage, layer, number)
            self.reduced.setdefault(self.rank_of[stage], []).append(event)
            taken += piece.seconds
        return taken

    def _stream_state(
        self, dense: float, experts: float, where: str, after: tuple[int, ...], stage: int, layer: int, number: int
    ) -> None:
        """The optimizer's state of a layer whose gradients are there, beside the backward of the layers below."""
        if (state := self.lengths.streamed_state(dense, experts)) is not None:
            self._add(state, where, "backward", after, stage, layer, number)

    def _update(self, stage: int) -> None:
        """`stage`: the first one of a rank, which has its number."""
        lengths, own_stages = self.lengths, [i for i, rank in enumerate(self.rank_of) if rank == stage]
        layers = tuple(layer for i in own_stages for layer in self.stages[i])
        ends = (0 in own_stages) + (len(self.stages) - 1 in own_stages)
        dense, experts = lengths.parameters(layers, ends)
        last = (self.last_of[stage],)
        before = (*self.reduced.get(stage, ())[-4:], *last)
        if stage == 0:
            # The embedding's gradient comes last.
            size = lengths.embeddings / 2 if not lengths.shape.tied else 0.0
            self._reduce(size, 0.0, "embedding", last, stage, None, self.number * self.parts)
            before += tuple(self.reduced.get(stage, ())[-2:])
        for piece in lengths.update(dense, experts):
            before = (self._add(piece, "step", "update", before, stage, None, 0),)
