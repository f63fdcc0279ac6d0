"""How long a step takes at least, without its event graph: what each stream has to do one after the other.

    Bounds(problem).seconds(candidate)      at most what `carpool.planner.step` predicts; sums of layers are kept

A search asks for thousands of bounds and predicts a few steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from carpool.parallel.schedules import SCHEDULES, rank_of
from carpool.planner.configuration.candidate import Candidate
from carpool.planner.configuration.stages import stage_layers
from carpool.planner.model.shape import LayerShape
from carpool.planner.search.space import Problem
from carpool.planner.step.events import COMMUNICATION
from carpool.planner.step.lengths import STEP_HOST, TAKEN


class Bounds:
    """See the module's docstring."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sums: dict[Any, Any] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Seconds that the step takes at least, by what each stream has to do one after the other.

        With schedule "none" one micro-batch does all pieces but gathers and reductions in turn. With two batches that
        holds for what computes alone. In a pipeline the last rank waits for the first forward through the stages before
        its first one, and its last backward goes back through them, at least its half that others wait for.
        """
        pp, accumulation = candidate.degrees.pp, candidate.accumulation
        schedule = candidate.pipeline if pp > 1 else "1F1B"
        kind = SCHEDULES[schedule]
        stages = stage_layers(self.problem.model, candidate.degrees, kind.stages)
        own = [stage for stage in range(len(stages)) if rank_of(schedule, pp, stage) == pp - 1]
        layers = tuple(layer for stage in own for layer in stages[stage])
        before = sum(self._stage_seconds(candidate, stages[stage], False)[0] for stage in range(pp - 1))
        chain, computing, rides, *beside = self._stage_seconds(candidate, layers, own[-1] == len(stages) - 1)
        one = chain if candidate.schedule == "none" else computing
        if candidate.schedule == "two-batch":
            one, beside = computing + TAKEN * rides, [*beside, rides]
        if pp > 1:
            alone = one if candidate.paired else computing
            one = alone if kind.stages > 1 else ((accumulation - 1) * computing + chain) / accumulation
        return (
            STEP_HOST
            + before * (0.5 if kind.splits else 1.0)
            + accumulation * max(one, *beside)
            + self._update_seconds(candidate, layers)
        )

    def _stage_seconds(self, candidate: Candidate, layers: tuple[LayerShape, ...], last: bool) -> list[float]:
        """[all pieces, what computes, rides, gathers, reductions, host] of one micro-batch's forward and backward."""
        parts = [self._layer_seconds(candidate, layer, number) for layer, number in Counter(layers).items()]
        if last:
            parts.append(self._layer_seconds(candidate, None, 1))
        return [sum(of) for of in zip(*parts, strict=True)]

    def _layer_seconds(self, candidate: Candidate, layer: LayerShape | None, number: int) -> list[float]:
        """The same of so many equal layers; of the head."""
        key = (
            layer, candidate.degrees, candidate.micro_batch, candidate.transport, candidate.layers_compiled,
            candidate.captured, candidate.data_parallel, tuple(candidate.policies.values()),
        )  # fmt: skip
        if key not in self.sums:
            lengths = self.problem.lengths(candidate)
            host = gathers = reductions = 0.0
            if layer is None:
                pieces = [*lengths.head(False), *lengths.head(True)]
            else:
                pieces = [*lengths.forward(layer), *lengths.backward(layer)]
                host = lengths.host(False) + lengths.host(True)
                gathers = 2 * sum(piece.seconds for piece in lengths.gathers(layer))
                if candidate.data_parallel == "fsdp":
                    experts = lengths.experts_of_layer if layer.experts else 0.0
                    reduced = lengths.reductions(lengths.dense_of(layer), experts)
                    reductions = sum(piece.seconds for piece in reduced if piece.name != "copies")
            chain = sum(piece.seconds for piece in pieces)
            travels = sum(piece.seconds for piece in pieces if piece.kind in COMMUNICATION)
            rides = sum(piece.seconds for piece in pieces if piece.kind in ("dispatch", "combine"))
            self.sums[key] = [chain, chain - travels, rides, gathers, reductions, host]
        return [number * one for one in self.sums[key]]

    def _update_seconds(self, candidate: Candidate, layers: tuple[LayerShape, ...]) -> float:
        key = (
            "update",
            candidate.degrees,
            candidate.data_parallel,
            candidate.optimizer_offload,
            candidate.optimizer_in_backward,
        )
        if key not in self.sums:
            lengths = self.problem.lengths(candidate)
            ends = 1 + (candidate.degrees.pp == 1)
            self.sums[key] = sum(piece.seconds for piece in lengths.update(*lengths.parameters(layers, ends)))
        found: float = self.sums[key]
        return found
