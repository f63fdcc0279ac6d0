"""The best configurations of a model on a cluster: everything is enumerated, and most of it is never predicted.

    found = plan(shape, find_hardware("H100"), gpus=64, per_node=8, tokens=4 * 2**20, sequence_length=4096)
    found.plans[0].prediction.seconds, found.plans[0].memory.total, found.plans[0].candidate.settings()

    enumerated    degrees x micro-batch x transport x schedule x dense x policies x where the optimizer's state is
    dominated     saves memory that a faster one of the same degrees does not need either
    memory        does not fit (`carpool.planner.peak`)
    bound         its chain of events alone takes longer than the best steps found so far take in full
    predicted     its event graph is built and run (`carpool.planner.step`), of many micro-batches the first ones

Nothing that is dropped can be the best, so the result is that of predicting all (`tests/planner/test_search.py`
does). What is left to the run itself, because it measures better: expert stages, kept policies in finer grain, chunks.

Published planners take other ways through the same space: `carpool.planner.systems` has what each would choose.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, product
from typing import TYPE_CHECKING, Any

from carpool.parallel.combinations import refusal
from carpool.parallel.degrees import DENSE_AXES, EXPERT_AXES, Degrees
from carpool.parallel.schedules import PAIRED, SCHEDULES, check_micro_batches, rank_of
from carpool.planner.candidate import KEEP, Candidate
from carpool.planner.hardware import Hardware
from carpool.planner.lengths import STEP_HOST, TAKEN, Lengths, stage_layers
from carpool.planner.model_shape import LayerShape, ModelShape
from carpool.planner.moves import Place, relieve
from carpool.planner.peak import Peak, memory_of
from carpool.planner.routes import Routes
from carpool.planner.step import Prediction, inputs, predict, step_seconds

if TYPE_CHECKING:
    from carpool.planner.systems import System

# From those that cost no time on. A later one is tried where none that it contains fits.
POLICIES: tuple[Mapping[str, str], ...] = (
    {},
    {"hidden": "recompute"},
    {"rows": "resend"},
    {"hidden": "recompute", "rows": "resend"},
    {"hidden": "offload"},
    {"dense": "recompute"},
    {"dense": "recompute", "hidden": "recompute"},
    {"dense": "recompute", "hidden": "recompute", "rows": "resend"},
    {"dense": "recompute", "sums": "recompute"},
)
OF_RIDES = ("none", "two-batch")
# Where the optimizer's state is and how gradients come to it, from those that cost no time on.
_UPDATES = (("device", "kept"), ("device", "consumed"), ("host", "consumed"), ("host", "kept"))
# Of the memory of a device: the rest is for what the prediction misses.
USABLE = 0.92
# Tokens of a rank's micro-batch.
MOST_TOKENS = 65_536


@dataclass(frozen=True)
class Plan:
    """A configuration, and what is predicted of it.

    Attributes:
        inputs: what the prediction rests on, and where each is from.
    """

    candidate: Candidate
    prediction: Prediction
    memory: Peak
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        plans: the fastest first.
        counts: configurations by what became of them (see the module's docstring).
        seconds: that the search took.
        least_memory: bytes of the configuration that needs least; for who finds no plan.
        refused: why configurations were not allowed, and how many.
    """

    plans: tuple[Plan, ...]
    counts: Mapping[str, int]
    seconds: float
    least_memory: float
    refused: Mapping[str, int]


@dataclass(frozen=True)
class Space:
    """What may vary, as sequences of what is allowed, and what does not. Words are those of `Candidate`.

    Attributes:
        pp, tp, cp, etp, ep: sizes; an empty sequence: all that divide.
        replicas: copies of the sharded model; None: 1, and one for each node.
        micro_batches: sequences; None: all that divide a rank's.
        transports, schedules, dense, optimizer_state, gradients: words, from those that cost no time on.
        chunks: numbers of them, with schedule "chunks".
        policies: of what is kept, from those that cost no time on; what one leaves out is kept.
        pipelines, pairs: the orders of stages, and whether pairs of a forward and a backward may run at once.
        max_grad_norm, compiled, graphs, stage_graphs, moments, optimizer, stored, experts: the same for all.
        allowed, runs: why some degrees, or a whole configuration that would be among the best, cannot be; None: it can.
    """

    pp: Sequence[int] = ()
    tp: Sequence[int] = (1, 2, 4, 8)
    cp: Sequence[int] = ()
    etp: Sequence[int] = (1, 2)
    ep: Sequence[int] = ()
    replicas: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    transports: Sequence[str] = ("nvlink", "hierarchical", "dedup")
    schedules: Sequence[str] = OF_RIDES
    chunks: Sequence[int] = (2,)
    dense: Sequence[str] = ("replicate", "fsdp")
    policies: Sequence[Mapping[str, str]] = POLICIES
    optimizer_state: Sequence[str] = ("device", "host")
    gradients: Sequence[str] = ("kept",)
    max_grad_norm: float = 1.0
    compiled: bool = True
    graphs: bool = True
    stage_graphs: bool = False
    moments: str = "float32"
    optimizer: str = "one-pass"
    stored: int = 2
    experts: str = "grouped"
    pipelines: Sequence[str] = ("1F1B", "Interleaved1F1B", "DualPipeV")
    pairs: bool = True
    allowed: Callable[[Degrees], str | None] = field(default=lambda degrees: None)
    runs: Callable[[Candidate], str | None] = field(default=lambda candidate: None)


def plan(
    model: ModelShape,
    hardware: Hardware,
    *,
    gpus: int,
    tokens: int,
    sequence_length: int,
    per_node: int = 8,
    memory: float | None = None,
    routes: Routes | None = None,
    space: Space | None = None,
    best: int = 5,
    system: System | None = None,
) -> Found:
    """The fastest configurations that fit.

    Args:
        tokens: of a step, all GPUs together.
        per_node: GPUs of a node, consecutive ranks.
        memory: bytes that a rank may use; None: what the device has.
        routes: what tokens choose; None: uniform.
        space: what may vary; None: all that is known.
        best: how many to return.
        system: a published planner, whose choices these are (`carpool.planner.systems`); None: the fastest.

    Raises:
        ValueError: numbers that do not go together; the message says what to change."""
    began = time.perf_counter()
    space, routes, per_node = space or Space(), routes or Routes(), min(per_node, gpus)
    if system is not None:
        # Published planners know one schedule of stages.
        space = replace(system.restrict(space, model), pipelines=space.pipelines[:1], pairs=False)
    if gpus % per_node:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {per_node}: change one of them")
    if tokens % sequence_length:
        raise ValueError(f"{tokens:,} tokens of a step are not whole sequences of {sequence_length:,} tokens")
    if memory is None:
        if hardware.capacity is None:
            raise ValueError(
                f"the memory of {hardware.name} is not known: say what a rank may use, such as --memory 70GiB"
            )
        memory = USABLE * hardware.capacity
    search = _Search(model, hardware, per_node, memory, routes, space, best, system)
    search.run(gpus, tokens // sequence_length, sequence_length)
    plans = tuple(
        Plan(one.candidate, one, memory_of(model, one.candidate, routes, True), inputs(hardware, one.candidate, routes))
        for one in search.sorted_best()
    )
    return Found(plans, dict(search.counts), time.perf_counter() - began, search.least, dict(search.refused))


def divisors(number: int) -> list[int]:
    """In order."""
    return [one for one in range(1, number + 1) if number % one == 0]


def all_degrees(model: ModelShape, gpus: int, per_node: int, sequence_length: int, space: Space) -> Iterator[Degrees]:
    """Every way to divide the ranks that makes sense: tensor and context parallelism inside a node."""
    for pp in space.pp or [p for p in divisors(gpus) if p <= min(16, len(model.layers))]:
        if gpus % pp:
            continue
        stage = gpus // pp
        for tp, cp in product(
            space.tp, space.cp or [c for c in (1, 2, 4, 8) if c == 1 or sequence_length // c >= 4096]
        ):
            if tp * cp > per_node or stage % (tp * cp) or any(layer.key_heads % tp for layer in model.kinds):
                continue
            data = stage // (tp * cp)
            nodes = max(1, stage // per_node)
            for replicas in sorted({1, nodes} if space.replicas is None else set(space.replicas)):
                if data % replicas:
                    continue
                copy = stage // replicas
                for etp in space.etp:
                    eps = [e for e in divisors(copy // etp) if model.num_experts % e == 0] if copy % etp == 0 else []
                    for ep in eps:
                        if space.ep and ep not in space.ep:
                            continue
                        if ep > 1 and ep % tp and tp > 1:
                            continue
                        # How fast slices compute was not measured: only where whole experts are too few for the ranks.
                        if etp > 1 and (ep < model.num_experts or etp > per_node):
                            continue
                        yield Degrees(replicas, data // replicas, tp, ep, cp, pp, etp)


class _Search:
    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        per_node: int,
        memory: float,
        routes: Routes,
        space: Space,
        best: int,
        system: System | None = None,
    ) -> None:
        self.model, self.hardware, self.per_node, self.memory = model, hardware, per_node, memory
        self.routes, self.space, self.best, self.system = routes, space, best, system
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.least = float("inf")
        self.found: list[tuple[float, int, Candidate]] = []  # a heap, the slowest of the best first
        self.number = count()
        self.sums: dict[Any, Any] = {}

    def sorted_best(self) -> list[Prediction]:
        found = [predict(self.model, self.hardware, one, self.per_node, self.routes) for _, _, one in self.found]
        own_order = self.system is not None and self.system.order is not None
        return found if own_order else sorted(found, key=lambda one: one.seconds.middle)

    def run(self, gpus: int, sequences: int, length: int) -> None:
        if self.system is not None and self.system.moves:
            return self._relieve(gpus, sequences, length)
        if self.system is not None and (order := self.system.order) is not None:
            ordered = order(list(self._candidates(gpus, sequences, length)), self.lengths)
            best = islice(filter(self._runs, ordered), self.best)
            self.found = [(0.0, number, one) for number, one in enumerate(best)]
            self.counts["ordered"] += len(ordered)
            return None
        return self._run(gpus, sequences, length)

    def lengths(self, candidate: Candidate) -> Lengths:
        return Lengths(self.model, self.hardware, candidate, self.per_node, self.routes)

    def _run(self, gpus: int, sequences: int, length: int) -> None:
        waiting = []
        for candidate in self._candidates(gpus, sequences, length):
            waiting.append((self.bound(candidate), next(self.number), candidate))
        heapq.heapify(waiting)
        while waiting:
            bound, _, candidate = heapq.heappop(waiting)
            if len(self.found) == self.best and bound >= -self.found[0][0]:
                self.counts["bound"] += 1 + len(waiting)
                return
            seconds = self._predicted(candidate, bound)
            if (len(self.found) == self.best and seconds >= -self.found[0][0]) or not self._runs(candidate):
                continue
            heapq.heappush(self.found, (-seconds, next(self.number), candidate))
            if len(self.found) > self.best:
                heapq.heappop(self.found)

    def _predicted(self, candidate: Candidate, bound: float) -> float:
        """Seconds of its step."""
        self.counts["predicted"] += 1
        # Of a step that waits for the host, the first layers are too few to tell.
        return max(bound, step_seconds(self.model, self.hardware, candidate, self.per_node, self.routes))

    def _runs(self, candidate: Candidate) -> bool:
        if reason := self.space.runs(candidate):
            self.refused[reason] += 1
        return not reason

    def _relieve(self, gpus: int, sequences: int, length: int) -> None:
        """By moves away from the bottleneck (`carpool.planner.moves`), from experts that are spread over a node."""
        places = {Place(one.degrees, one.micro_batch): one for one in self._bases(gpus, sequences, length)}
        if not places:
            return
        start = min(
            places,
            key=lambda one: (
                one.size("pp") * one.size("tp") * one.size("cp"),
                one.size("micro_batch"),
                abs(one.size("ep") - self.per_node),
                one.size("dp_replicate"),
            ),
        )
        found = relieve(places, self, start)
        if found is not None:
            self.found = [(0.0, 0, found)]

    def best_of(self, base: Candidate) -> tuple[float, Candidate] | None:
        """(seconds, the fastest variant of these degrees that fits); None: none does."""
        found: tuple[float, Candidate] | None = None
        for one in self._of_degrees(base):
            bound = self.bound(one)
            if found is None or bound < found[0]:
                seconds = self._predicted(one, bound)
                if (found is None or seconds < found[0]) and self._runs(one):
                    found = seconds, one
        return found

    def exposed(self, candidate: Candidate) -> Mapping[str, float]:
        """Seconds of its step, by kind of event; of its first micro-batches."""
        fewer = replace(candidate, accumulation=min(candidate.accumulation, 2 * candidate.degrees.pp))
        return predict(self.model, self.hardware, fewer, self.per_node, self.routes).exposed

    def _candidates(self, gpus: int, sequences: int, length: int) -> Iterator[Candidate]:
        for base in self._bases(gpus, sequences, length):
            yield from self._of_degrees(base)

    def _bases(self, gpus: int, sequences: int, length: int) -> Iterator[Candidate]:
        """One candidate for each way to divide the ranks and each micro-batch."""
        space = self.space
        for degrees in all_degrees(self.model, gpus, self.per_node, length, space):
            if reason := space.allowed(degrees):
                self.refused[reason] += 1
                continue
            if sequences % degrees.dp:
                self.refused[f"{sequences} sequences of a step cannot be divided among all data-parallel ranks"] += 1
                continue
            own = sequences // degrees.dp
            for micro_batch in divisors(own) if space.micro_batches is None else space.micro_batches:
                if own % micro_batch or (micro_batch > 1 and micro_batch * length / degrees.cp > MOST_TOKENS):
                    continue
                accumulation = own // micro_batch
                if degrees.pp > 1 and accumulation < degrees.pp:
                    continue
                # Layers of a pipeline are not compiled.
                base = Candidate(
                    degrees, length, micro_batch, accumulation, compiled=space.compiled and degrees.pp == 1,
                    graphs=space.graphs, moments=space.moments, experts=space.experts, optimizer=space.optimizer,
                    stored=space.stored, max_grad_norm=space.max_grad_norm, stage_graphs=space.stage_graphs,
                )  # fmt: skip
                yield base

    def _of_degrees(self, base: Candidate) -> Iterator[Candidate]:
        space, degrees = self.space, base.degrees
        replicates = degrees.tp == 1 and degrees.dp_cp > 1
        transports = transports_of(base, self.per_node, self.hardware, space.transports)
        if not transports:
            self.refused[f"no transport of {', '.join(space.transports)} joins the ranks of a layer's experts"] += 1
        schedules = [(one, n) for one in space.schedules for n in (space.chunks if one == "chunks" else (1,))]
        if degrees.pp > 1:
            schedules = [one for one in schedules if one[0] != "two-batch"] + [("two-batch", 1)] * space.pairs
        for transport, (schedule, chunks), dense, pipeline in product(
            transports,
            schedules,
            [one for one in space.dense if replicates or one != "replicate"] or ["fsdp"],
            self._pipelines(base) if degrees.pp > 1 else ("1F1B",),
        ):
            if degrees.pp == 1 and schedule == "two-batch" and not self._halves(base):
                continue
            # Where there are rides, pairs hide them, and the same schedule without pairs is not looked at.
            pairs = pipeline in PAIRED and degrees.expert_ranks > 1 and space.pairs
            if degrees.pp > 1 and (schedule == "two-batch") != pairs:
                continue
            if schedule == "chunks" and degrees.expert_ranks == 1:
                continue
            one = replace(base, transport=transport, schedule=schedule, chunks=chunks, dense=dense, pipeline=pipeline)
            if self.system is not None and self.system.refine is not None:
                one = self.system.refine(one, self.lengths(one))
            yield from self._that_fit(one)

    def _pipelines(self, base: Candidate) -> Iterator[str]:
        """The schedules of stages that can be."""
        pp = base.degrees.pp
        for one in self.space.pipelines:
            kind, why = SCHEDULES[one], None
            if pp * kind.stages > len(self.model.layers):
                why = f"{one}: there are fewer layers than stages"
            elif self.model.tied and not kind.is_v:
                why = f"{one}: the embedding and the head, which share a weight, would be on two ranks"
            try:
                check_micro_batches(one, pp, base.accumulation)
            except ValueError:
                why = f"{one} on {pp} stages needs another number of micro-batches"
            if why is None:
                yield one
            else:
                self.refused[why] += 1

    @staticmethod
    def _halves(base: Candidate) -> bool:
        """Whether two halves, or two micro-batches, can be in turns."""
        if base.degrees.ep * base.degrees.etp == 1:
            return False
        return base.accumulation % 2 == 0 if base.accumulation > 1 else base.micro_batch % 2 == 0

    def _that_fit(self, base: Candidate) -> Iterator[Candidate]:
        """The policies that need memory least, of those that fit."""
        fitting: list[Mapping[str, str]] = []
        # The slowest last: of state in host memory, what travels beside the backward comes first.
        kept = [(state, "kept") for state in self.space.optimizer_state if "kept" in self.space.gradients]
        used = [(state, "consumed") for state in self.space.optimizer_state if "consumed" in self.space.gradients]
        if used and (base.accumulation > 1 or base.schedule == "two-batch"):
            used = []
            if not kept:
                self.refused["one backward consumes gradients, and those of several would be added"] += 1
        for state, gradients in sorted(kept + used, key=_UPDATES.index):
            for policies in self.space.policies:
                if any(contained.items() <= policies.items() for contained in fitting):
                    self.counts["dominated"] += 1
                    continue
                if base.degrees.ep == 1 and "rows" in policies:
                    continue
                if base.schedule == "two-batch" and policies.get("sums") == "recompute":
                    continue
                one = replace(base, policies={**KEEP, **policies}, optimizer_state=state, gradients=gradients)
                if (rule := refusal(sizes_of(one.degrees), one.flat_settings())) is not None:
                    self.refused[f"{' and '.join(rule.axes)}: {rule.why}"] += 1
                    continue
                total = memory_of(self.model, one, self.routes).total
                self.least = min(self.least, total)
                if total > self.memory:
                    self.counts["memory"] += 1
                    continue
                fitting.append(policies)
                yield one

    # -- bounds --------------------------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> float:
        """Seconds that the step takes at least, by what each stream has to do one after the other.

        With schedule "none" one micro-batch does all pieces but gathers and reductions in turn. With two batches that
        holds for what computes alone. In a pipeline the last rank waits for the first forward through the stages before
        its first one, and its last backward goes back through them, at least its half that others wait for.
        """
        pp, accumulation = candidate.degrees.pp, candidate.accumulation
        schedule = candidate.pipeline if pp > 1 else "1F1B"
        kind = SCHEDULES[schedule]
        stages = stage_layers(self.model, candidate.degrees, kind.stages)
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
            candidate.captured, candidate.dense, tuple(candidate.policies.values()),
        )  # fmt: skip
        if key not in self.sums:
            lengths = self.lengths(candidate)
            host = gathers = reductions = 0.0
            if layer is None:
                pieces = [*lengths.head(False), *lengths.head(True)]
            else:
                pieces = [*lengths.forward(layer), *lengths.backward(layer)]
                host = lengths.host(False) + lengths.host(True)
                gathers = 2 * sum(piece.seconds for piece in lengths.gathers(layer))
                if candidate.dense == "fsdp":
                    experts = lengths.experts_of_layer if layer.experts else 0.0
                    reduced = lengths.reductions(lengths.dense_of(layer), experts)
                    reductions = sum(piece.seconds for piece in reduced if piece.name != "copies")
            chain = sum(piece.seconds for piece in pieces)
            travels = sum(piece.seconds for piece in pieces if piece.kind in _TRAVELS)
            rides = sum(piece.seconds for piece in pieces if piece.kind in ("dispatch", "combine"))
            self.sums[key] = [chain, chain - travels, rides, gathers, reductions, host]
        return [number * one for one in self.sums[key]]

    def _update_seconds(self, candidate: Candidate, layers: tuple[LayerShape, ...]) -> float:
        key = "update", candidate.degrees, candidate.dense, candidate.optimizer_state, candidate.gradients
        if key not in self.sums:
            lengths = self.lengths(candidate)
            ends = 1 + (candidate.degrees.pp == 1)
            self.sums[key] = sum(piece.seconds for piece in lengths.update(*lengths.parameters(layers, ends)))
        found: float = self.sums[key]
        return found


def sizes_of(degrees: Degrees) -> dict[str, int]:
    """Ranks by axis, as `carpool.parallel.combinations` asks for them."""
    return {axis: degrees.size(axis) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))}


_TRAVELS = ("dispatch", "combine", "gather", "reduction", "send")


def transports_of(candidate: Candidate, per_node: int, hardware: Hardware, among: Sequence[str]) -> list[str]:
    """Those that the expert-parallel group can use."""
    degrees = candidate.degrees
    if degrees.ep * degrees.etp == 1:
        return ["local"]
    axis = "ep" if degrees.ep > 1 else "etp"
    ranks = degrees.ranks_along(0, axis)
    inside = sum(rank < per_node for rank in ranks)
    nvlink, hops = inside == len(ranks) and hardware.nvlink is not None, 1 < inside < len(ranks)
    takes = {"nvlink": nvlink, "hierarchical": hops, "local": False}
    found = [one for one in among if takes.get(one, True)]
    # The same rows, sooner.
    return [one for one in found if one != "dedup" or "nvlink" not in found]
