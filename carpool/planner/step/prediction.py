"""What is predicted of one configuration's step, from its event graph (`carpool.planner.step.graph`).

    prediction = predict(shape, find_hardware("H100"), candidate, per_node=8)
    prediction.seconds            Interval(1.21, 1.38, 1.71)
    prediction.exposed            {"dispatch": 0.08, ...}: what no computation hides, on a rank

Bounds: all rates at once at their better, or worse, end. So an interval is wider than what is likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from carpool.parallel.schedules import SCHEDULES
from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.events import COMMUNICATION, exposed_of
from carpool.planner.step.graph import BOUNDS, StepClock
from carpool.planner.step.lengths import Lengths

_PERIOD = 8  # layers after which their kinds repeat


class Interval(NamedTuple):
    """A number that is predicted, and bounds of it."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a step.

    Attributes:
        busiest: the stage that ends last.
        mfu: model FLOPs utilisation; None where the device's peak is not known.
        flops: operations of the mathematics, of one rank.
    """

    candidate: Candidate
    clock: StepClock
    busiest: int
    seconds: Interval
    mfu: Interval | None
    flops: float

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of the step of the busiest stage by kind: what computes, and what else is exposed."""
        layers = len(self.clock.lengths.shape.layers)
        done = self.clock.run(self.candidate.accumulation, layers, watched=self.busiest)
        return exposed_of(done.spans, done.step)

    @property
    def communication(self) -> float:
        """Seconds of rides, gathers, reductions and sends that nothing hides."""
        return sum(self.exposed.get(kind, 0.0) for kind in COMMUNICATION)

    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.candidate.tokens / self.seconds.middle / self.candidate.degrees.world_size


def predict(
    shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int, routes: Routes | None = None
) -> Prediction:
    """What is predicted of a step.

    Args:
        per_node: GPUs of a node, consecutive ranks.
        routes: what tokens choose; None: uniform.

    Raises:
        ValueError: a pipeline that cannot be."""
    clock = StepClock(Lengths(shape, hardware, candidate, per_node, routes))
    low, middle, high = (clock.run(candidate.accumulation, len(shape.layers), bound) for bound in BOUNDS)
    flops = shape.flops_per_token(candidate.sequence_length) * candidate.tokens / candidate.degrees.world_size
    seconds, mfu = Interval(low.step, middle.step, high.step), None
    if hardware.peak_flops is not None:
        mfu = Interval(*(flops / one / hardware.peak_flops for one in reversed(seconds)))
    return Prediction(candidate, clock, middle.busiest, seconds, mfu, flops)


def step_seconds(
    shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int, routes: Routes | None = None
) -> float:
    """The middle of `predict`'s seconds, sooner: of many micro-batches and of many layers only the first ones are run.

    Each further micro-batch takes as long as the one before it, and eight further layers as long as the eight before
    them where kinds of layers repeat after eight. In a pipeline that holds for one further layer a stage. Where layers
    offload, all are run: copies fall behind little by little.
    """
    parts = candidate.at_once if candidate.accumulation > 1 else 1
    # Where a rank has two stages, the first micro-batches are under way in both, and the next ones wait for them.
    filling = 2 * SCHEDULES[candidate.pipeline].stages if candidate.degrees.pp > 1 else 2
    first, number = max(2, filling * candidate.degrees.pp), candidate.accumulation // parts
    # Interleaved schedules go in rounds.
    more = candidate.degrees.pp if candidate.pipeline.startswith("Interleaved") else 1
    layers = len(shape.layers)

    clock = StepClock(Lengths(shape, hardware, candidate, per_node, routes))

    def run(micro_batches: int, some: int) -> float:
        return clock.seconds(max(1, micro_batches) * parts, some)

    def of_layers(micro_batches: int) -> float:
        pp = candidate.degrees.pp
        # A layer more on each stage of a pipeline whose layers are alike, or one period more.
        if pp > 1:
            period = pp * SCHEDULES[candidate.pipeline].stages
            start = layers - period * (min(map(len, shape.stages(period))) - 1)
            alike = len(shape.kinds) == 1
        else:
            period, start = _PERIOD, _PERIOD + layers % _PERIOD
            alike = layers >= 4 * period and shape.layers[start + period :] == shape.layers[start:-period]
        if layers < start + 2 * period or not alike or "offload" in candidate.policies.values():
            return run(micro_batches, layers)
        one, two = run(micro_batches, start), run(micro_batches, start + period)
        return two + (layers - start - period) / period * (two - one)

    if number <= first + more:
        return of_layers(number)
    one, two = of_layers(first), of_layers(first + more)
    return two + (number - first - more) / more * (two - one)


def inputs(hardware: Hardware, candidate: Candidate, routes: Routes, shape: ModelShape) -> Mapping[str, str]:
    """What a prediction rests on, and where each is from."""
    kernels = ("dense", "experts", "experts backward", "attention 128", "elementwise", "optimizer")
    found = {f"{name} (kernels)": hardware.kernel(name).source for name in kernels}
    if not candidate.captured:
        found["host's launches"] = hardware.kernel("host ride").source
    found["links inside a node"] = hardware.link_source(hardware.node_link)
    found["links between nodes"] = hardware.link_source("network")
    found["choices of experts"] = "measured" if routes.chosen else "assumed"
    found["passes over memory, host's time for a layer"] = "fitted"
    if any(layer.kind == "linear" for layer in shape.kinds):
        found["linear attention, by kernels such as flash-linear-attention's"] = "assumed"
    return found
