"""A step at any size: what drawn routing, slow ranks and lost links make of it, and how it scales.

    step = build(16384)                    a configuration on so many GPUs: its event graph, and over what tokens spread
    simulate(build, 16384, trace)          scaling, sensitivity, failures

Three numbers of each size, in this order because each adds something:

    balanced     all ranks are alike: one rank stands for all
    drawn        each rank has loads and rows of its own (`sampling.py`); ranks meet in every layer, so the
                 step is the sum over layers of the maximum over ranks
    low, high    the drawn step with the bounds of every length, all of them at once

What goes wrong is one factor on the lengths of some events of some ranks: a rank that computes at 0.9 of the speed of
the others, a rank with a link of half the bandwidth, a node that has lost one of its ports.

A configuration on another number of GPUs has every axis as it is, but for the data-parallel one that grows:

    fsdp 8, ep 8 on 64 GPUs       ->  fsdp 2,048, ep 8 on 16,384: parameters are sharded over all of them
    fsdp 8, 8 replicas on 64      ->  fsdp 8, 2,048 replicas
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.shape import ModelShape
from carpool.planner.simulator.goodput import Failures
from carpool.planner.simulator.sampling import SampledRouting, Spread
from carpool.planner.step.events import (
    COMMUNICATION,
    COMPUTATION,
    STREAM_OF,
    Array,
    Event,
    Execution,
    Graph,
    Group,
    Seconds,
    execute,
)
from carpool.planner.step.graph import step_graph
from carpool.planner.step.lengths import Lengths
from carpool.planner.step.peak import memory_of
from carpool.planner.transports import transport_class

if TYPE_CHECKING:
    from carpool.placement.trace import Trace


@dataclass(frozen=True)
class Step:
    """A configuration on some number of GPUs.

    Attributes:
        gpus: all ranks.
        graph: of a step, as balanced ranks do it.
        spread: over what the tokens of a stage spread.
        tokens: of a step, all ranks together.
        label: the degrees of parallelism, for people.
        memory: bytes of the fullest rank; None: not known."""

    gpus: int
    graph: Graph
    spread: Spread
    tokens: int
    label: str
    memory: float | None = None

    @property
    def ranks(self) -> int:
        return self.spread.ranks

    def moe_layers(self) -> list[int]:
        """The layers that have rides or experts, in order."""
        kinds = ("dispatch", "experts", "combine")
        return sorted({e.layer for e in self.graph.events if e.kind in kinds and e.layer is not None})


def scaled(degrees: Degrees, gpus: int) -> Degrees:
    """The degrees on so many GPUs: copies of the model grow if there are several, otherwise the ranks that shard it.

    Raises:
        ValueError: the other degrees do not divide them; names the nearest numbers that they do."""
    if degrees.dp_replicate > 1:
        unit = degrees.world_size // degrees.dp_replicate
        axis = "dp_replicate"
    else:
        inner, experts = degrees.cp * degrees.tp, degrees.ep * degrees.etp
        unit = degrees.pp * math.lcm(inner, experts)
        axis = "fsdp"
    if gpus < unit or gpus % unit:
        below, above = gpus // unit * unit, -(-gpus // unit) * unit
        nearest = f"{above:,}" if below == 0 else f"{below:,} and {above:,}"
        raise ValueError(
            f"{gpus:,} GPUs cannot be divided by {degrees}: take a multiple of {unit:,}; nearest: {nearest}"
        )
    return replace(degrees, **{axis: gpus * degrees.size(axis) // degrees.world_size})


def step_on(shape: ModelShape, hardware: Hardware, candidate: Candidate, per_node: int, gpus: int) -> Step:
    """A configuration on so many GPUs, with balanced ranks.

    Raises:
        ValueError: as `scaled`; nodes that are not whole."""
    degrees = scaled(candidate.degrees, gpus)
    per_node = min(per_node, gpus)
    if gpus % per_node:
        raise ValueError(
            f"{gpus:,} GPUs are not whole nodes of {per_node}: take a multiple of {per_node}, or change --gpus-per-node"
        )
    candidate = replace(candidate, degrees=degrees)
    lengths = Lengths(shape, hardware, candidate, per_node)
    group = lengths.members_per_node("ep")[0] if degrees.ep > 1 else Group(1)
    halves = candidate.schedule == "two-batch" and candidate.accumulation == 1
    way = transport_class(candidate.transport)
    each = way.choices_per_send(max(2, shape.top_k)) == 1
    spread = Spread(
        ranks=degrees.stage_size,
        group=group,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        tokens=candidate.rank_tokens // (2 if halves else 1),
        ranks_per_node=per_node,
        one_row_for="expert" if each else "node" if way.one_send_per_node else "rank",
        even=candidate.spare.slots > 0,
    )
    memory = memory_of(shape, candidate).total
    label = candidate.label.partition(",")[0]
    return Step(gpus, step_graph(lengths), spread, candidate.tokens, label, memory)


SLOW_SPEED, SLOW_LINK = 0.9, 0.5
STRETCHES = (0.0, 1.0, 2.0, 4.0)
DRAWN_MICRO_BATCHES = 4  # that differ; a step with more of them has these again
# Events times ranks of the largest size at which every trouble is tried.
MOST_TROUBLED = 4_000_000

Factor = Callable[[Event], Seconds]


@dataclass(frozen=True)
class Size:
    """One number of GPUs. Times are in seconds.

    Attributes:
        balanced, drawn, low, high: see the module's docstring.
        tokens_per_second: of one GPU.
        efficiency: that, by that of the smallest size.
        imbalance: the fullest rank's load by the mean, averaged over layers and groups.
        memory: bytes of the fullest rank, if ranks are balanced.
    """

    gpus: int
    label: str
    balanced: float
    drawn: float
    low: float
    high: float
    tokens_per_second: float
    efficiency: float
    imbalance: float
    memory: float | None = None


@dataclass(frozen=True)
class Trouble:
    """What one thing costs: a step of so many seconds, and how much longer that is than the drawn one."""

    what: str
    step: float
    longer: float


@dataclass(frozen=True)
class Simulation:
    """All that was found.

    Attributes:
        sizes: the curve, from few GPUs to those that were asked for.
        troubles: at `trouble_gpus` GPUs.
        exposed: seconds of the step of the busiest rank by kind, "idle" included.
        path: seconds of the critical path by kind.
        execution: the drawn step at the last size, with the times of `shown` ranks of each stage.
        failures: None: not asked.
    """

    sizes: tuple[Size, ...]
    troubles: tuple[Trouble, ...]
    trouble_gpus: int
    exposed: dict[str, float]
    path: dict[str, float]
    step: Step = field(repr=False)
    execution: Execution = field(repr=False)
    failures: Failures | None = None
    routing: str = "uniform"

    def record(self) -> dict[str, Any]:
        last = self.sizes[-1]
        failures = None if self.failures is None else self.failures.record()
        goodput = {} if failures is None else {"tokens_per_second_with_failures": failures["goodput"] * self.throughput}
        return {
            "gpus": last.gpus,
            "parallelism": last.label,
            "routing": self.routing,
            "step_seconds": last.drawn,
            "step_seconds_low": last.low,
            "step_seconds_high": last.high,
            "tokens": self.step.tokens,
            "tokens_per_second": self.throughput,
            **goodput,
            "exposed_seconds": self.exposed,
            "critical_path_seconds": self.path,
            "sizes": [asdict(size) for size in self.sizes],
            "troubles": [asdict(trouble) for trouble in self.troubles],
            "trouble_gpus": self.trouble_gpus,
            "failures": failures,
        }

    @property
    def communication(self) -> float:
        """The share of the step in which a rank waits for others' data and computes nothing."""
        return sum(self.exposed.get(kind, 0.0) for kind in COMMUNICATION) / self.sizes[-1].drawn

    @property
    def throughput(self) -> float:
        """Tokens per second of all GPUs, without failures."""
        return self.step.tokens / self.sizes[-1].drawn


def simulate(
    build: Callable[[int], Step],
    gpus: int,
    trace: Trace | None = None,
    *,
    sizes: Sequence[int] | None = None,
    failures: Failures | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate a configuration.

    Args:
        build: the configuration on so many GPUs; raises ValueError where its degrees do not divide them.
        trace: of routing; None: uniform.
        sizes: of the curve, up to `gpus`; None: a quarter of `gpus`, a quarter of that, four times, as long as the
            configuration has them.

    Raises:
        ValueError: the configuration cannot have so many GPUs (the message names numbers that it can have), or the
            trace is of another model."""
    steps = [*_smaller(build, gpus, sizes), build(gpus)]
    found: list[Size] = []
    for step in steps:
        routing = sampled(step, trace, seed)
        run = execute(step.graph, step.ranks, drawn_seconds(step, routing), kept=shown_ranks(routing))
        balanced, low, high = (execute(step.graph, seconds=_field(name)).step for name in ("seconds", "low", "high"))
        rate = step.tokens / run.step / step.gpus
        found.append(
            Size(
                gpus=step.gpus,
                label=step.label,
                balanced=balanced,
                drawn=run.step,
                low=run.step * low / balanced,
                high=run.step * high / balanced,
                tokens_per_second=rate,
                efficiency=rate / (found[0].tokens_per_second if found else rate),
                imbalance=routing.imbalance(),
                memory=step.memory,
            )
        )
    fitting = [step for step in steps if len(step.graph.events) * step.ranks <= MOST_TROUBLED]
    of = fitting[-1] if fitting else steps[0]
    return Simulation(
        sizes=tuple(found),
        troubles=tuple(troubles(of, trace, seed)),
        trouble_gpus=of.gpus,
        exposed=run.exposed_seconds(),
        path=run.path_seconds(),
        step=steps[-1],
        execution=run,
        failures=failures,
        routing="uniform" if trace is None else "resampled from the trace",
    )


def _smaller(build: Callable[[int], Step], gpus: int, sizes: Sequence[int] | None) -> Iterator[Step]:
    quarters = [gpus >> shift for shift in range(8, 0, -2) if gpus % (1 << shift) == 0]
    for number in quarters if sizes is None else sizes:
        if number < gpus:
            try:
                yield build(number)
            except ValueError:
                # Asked for by name, it is an error; of the quarters, those that fit are shown.
                if sizes is not None:
                    raise


def sampled(step: Step, trace: Trace | None, seed: int = 0, stretch: float = 1.0) -> SampledRouting:
    stretch = 0.0 if step.spread.even else stretch
    return SampledRouting(step.spread, trace, layers=max(1, len(step.moe_layers())), seed=seed, stretch=stretch)


def drawn_seconds(step: Step, routing: SampledRouting, factor: Factor | None = None) -> Callable[[Event], Seconds]:
    """Lengths for `execute`: experts by the load of each rank, rides by its rows, and a factor on all of it."""
    number_of = {layer: number for number, layer in enumerate(step.moe_layers())}

    def seconds(event: Event) -> Seconds:
        found = event.seconds
        if event.layer in number_of and event.kind in ("experts", "dispatch", "combine"):
            at = number_of[event.layer], event.micro_batch % DRAWN_MICRO_BATCHES
            share_R = routing.load_R(*at) if event.kind == "experts" else routing.rows_R(*at)
            found = event.fixed + (found - event.fixed) * share_R
        return found if factor is None else found * factor(event)

    return seconds


def shown_ranks(routing: SampledRouting) -> tuple[int, ...]:
    """The ranks of a stage with the most and the least to compute, over all layers of the first micro-batch."""
    load_R = sum((routing.load_R(layer) for layer in range(routing.layers)), np.zeros(routing.spread.ranks))
    return tuple(dict.fromkeys((int(load_R.argmax()), int(load_R.argmin()))))


def troubles(step: Step, trace: Trace | None, seed: int = 0) -> Iterator[Trouble]:
    """What imbalance, a slow rank, a slow link and a lost port cost, each by itself."""
    routing = sampled(step, trace, seed)
    usual = execute(step.graph, step.ranks, drawn_seconds(step, routing), kept=(0,)).step

    def trouble(what: str, routing: SampledRouting, factor: Factor | None = None) -> Trouble:
        took = execute(step.graph, step.ranks, drawn_seconds(step, routing, factor), kept=(0,)).step
        return Trouble(what, took, took / usual - 1)

    for stretch in STRETCHES:
        stretched = sampled(step, trace, seed, stretch)
        name = {0.0: "balanced experts", 1.0: "experts as drawn"}.get(stretch, f"imbalance {stretch:g} times as large")
        yield trouble(f"{name}: fullest rank {stretched.imbalance():.3f} of the mean", stretched)
    yield trouble(f"one rank computes at {SLOW_SPEED:g} of the others' speed", routing, slow_rank(step, SLOW_SPEED))
    yield trouble(f"one rank's links have {SLOW_LINK:g} of the bandwidth", routing, slow_link(step, SLOW_LINK))
    ports = step.spread.ranks_per_node
    if 1 < ports < step.gpus:
        yield trouble(f"one node has lost one of {ports} ports", routing, lost_port(step))


def slow_rank(step: Step, speed: float) -> Factor:
    """The first rank computes at a share of the speed of the others."""
    slow_R = _of_ranks(step, 1, 1 / speed)
    return lambda event: slow_R if STREAM_OF[event.kind] == COMPUTATION and event.stage == 0 else 1.0


def slow_link(step: Step, share: float) -> Factor:
    """All links of the first rank have a share of their bandwidth."""
    slow_R = _of_ranks(step, 1, 1 / share)
    return lambda event: slow_R if event.stage == 0 and (event.group is not None or event.kind == "send") else 1.0


def lost_port(step: Step) -> Factor:
    """The first node has one port to the network less; what leaves the node is divided among the others."""
    ports = step.spread.ranks_per_node
    slow_R = _of_ranks(step, ports, ports / (ports - 1))

    def leaves(event: Event) -> bool:
        if event.kind == "send":
            return step.ranks >= ports
        return event.group is not None and event.group.size * event.group.stride > ports

    return lambda event: slow_R if event.stage == 0 and leaves(event) else 1.0


def _of_ranks(step: Step, number: int, factor: float) -> Array:
    """(ranks,) a factor for the first `number` of them, 1 for the others."""
    return np.where(np.arange(step.ranks) < number, factor, 1.0)


def _field(name: str) -> Callable[[Event], Seconds]:
    return lambda event: getattr(event, name)  # type: ignore[no-any-return]
