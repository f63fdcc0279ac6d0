"""Every configuration of a space that fits, without those that cannot be the best.

    bases       ways to divide the ranks x micro-batches
    variants    of one base: transport x schedule x FSDP or ZeRO-1 x pipeline x optimizer offload x policies

Of policies of saved activations, those are left out that save memory which a faster one does not need either
("dominated"), and those with which the configuration does not fit ("memory").

A search asks for thousands of bounds (`Bounds`: what each stream has to do one after the other) and bytes (`Memories`),
and predicts few steps. Sums of layers, and sizes that candidates have in common, are counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import PAIRED, SCHEDULES, check_micro_batches, rank_of
from carpool.planner.candidate import KEEP, Candidate, stage_layers
from carpool.planner.model.shape import LayerShape
from carpool.planner.search.space import Planner, Problem, Space
from carpool.planner.step.events import COMMUNICATION
from carpool.planner.step.lengths import STEP_HOST
from carpool.planner.step.peak import peak_of
from carpool.planner.step.sizes import RankSizes, sizes_of
from carpool.planner.transports import usable_transports
from carpool.plugins.counted import counted


class Memories:
    """See the module's docstring."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes: dict[Any, RankSizes] = {}

    def total(self, candidate: Candidate, most: float = float("inf")) -> float:
        """Bytes of the fullest stage. If they are more than `most`, those of the first stage of which this is true."""
        found = 0.0
        for stage in sorted({0, candidate.degrees.pp - 1}):
            found = max(found, peak_of(self._sizes(candidate, stage), candidate, stage).total)
            if found > most:
                break
        return found

    def _sizes(self, one: Candidate, stage: int) -> RankSizes:
        key = (
            stage, one.degrees, one.pipeline, one.micro_batch, one.sequence_length, one.transport, one.layers_compiled,
            one.divides_tokens, one.moments, one.optimizer, one.stored, one.computed,
        )  # fmt: skip
        if key not in self.sizes:
            self.sizes[key] = sizes_of(self.problem.model, one, stage, self.problem.routes)
        return self.sizes[key]


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
            one, beside = computing, [*beside, rides]
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
            self.sums[key] = sum(piece.seconds for piece in lengths.update(*lengths.parameters(layers, ends), layers))
        found: float = self.sums[key]
        return found


# Where the optimizer's state is and how gradients come to it, from those that cost no time on.
_UPDATES = (("none", False), ("none", True), ("host", True), ("host", False))
# Tokens of a rank's micro-batch.
MOST_TOKENS = 65_536


def divisors(number: int) -> list[int]:
    """In order."""
    return [one for one in range(1, number + 1) if number % one == 0]


def all_degrees(problem: Problem, space: Space) -> Iterator[Degrees]:
    """Every way to divide the ranks that makes sense: tensor and context parallelism inside a node."""
    model, gpus, per_node = problem.model, problem.gpus, problem.per_node
    for pp in space.pp or [p for p in divisors(gpus) if p <= min(16, len(model.layers))]:
        if gpus % pp:
            continue
        stage = gpus // pp
        for tp, cp in product(
            space.tp, space.cp or [c for c in (1, 2, 4, 8) if c == 1 or problem.sequence_length // c >= 4096]
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


class Enumeration:
    """See the module's docstring.

    Args:
        system: a published planner, which may decide more of each variant. The space is already restricted to its
            choices.

    Attributes:
        counts: configurations left out, by why: "dominated", "memory".
        refused: why configurations are not allowed, and how many.
        least: bytes of the one that needs least, of all that were looked at.
        tight: those that need more than the memory that may be used, and no more than there is.
    """

    def __init__(self, problem: Problem, space: Space, system: Planner | None = None) -> None:
        self.problem, self.space, self.system = problem, space, system
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.least = float("inf")
        self.memories = Memories(problem)
        self.tight: list[Candidate] = []

    def candidates(self) -> Iterator[Candidate]:
        """The variants of all bases."""
        for base in self.bases():
            yield from self.variants(base)

    def bases(self) -> Iterator[Candidate]:
        """One candidate for each way to divide the ranks and each micro-batch."""
        problem, space = self.problem, self.space
        sequences, length = problem.sequences, problem.sequence_length
        for degrees in all_degrees(problem, space):
            if reason := space.allowed(degrees):
                self.refused[reason] += 1
                continue
            if degrees.cp > 1 and problem.model.sinks:
                self.refused["cp: attention with sinks would write down whole score matrices"] += 1
                continue
            if sequences % degrees.dp:
                step = counted(sequences, "sequence")
                self.refused[f"{step} of a step cannot be divided among all data-parallel ranks"] += 1
                continue
            own = sequences // degrees.dp
            for micro_batch in divisors(own) if space.micro_batches is None else space.micro_batches:
                if own % micro_batch or (micro_batch > 1 and micro_batch * length / degrees.cp > MOST_TOKENS):
                    continue
                accumulation = own // micro_batch
                if degrees.pp > 1 and accumulation < degrees.pp:
                    continue
                base = Candidate(
                    degrees, length, micro_batch, accumulation, compiled=self._compiles(degrees.pp),
                    eager=space.eager, moments=space.moments, experts=space.experts, optimizer=space.optimizer,
                    averaged=space.averaged, spare=space.spare, peers=problem.hardware.nvlink is not None,
                    stored=space.stored, computed=space.computed, max_grad_norm=space.max_grad_norm,
                )  # fmt: skip
                yield base

    def _compiles(self, pp: int) -> bool:
        """Whether layers are compiled, as far as settings allow it with so many stages."""
        asked = {"parallelism.pp_size": pp, "training.torch_compile": "on"}
        unrolled = any(layer.kind == "linear" for layer in self.problem.model.layers)
        return self.space.compiled and not unrolled and self.space.excluded(asked) is None

    def variants(self, base: Candidate) -> Iterator[Candidate]:
        """Those of a base's degrees and micro-batch that fit."""
        space, degrees = self.space, base.degrees
        replicates = degrees.tp == 1 and degrees.dp_cp > 1
        transports = usable_transports(degrees, self.problem.per_node, self.problem.hardware, space.transports)
        if not transports:
            self.refused[f"no transport of {', '.join(space.transports)} joins the ranks of a layer's experts"] += 1
        schedules = [(one, n) for one in space.schedules for n in (space.chunks if one == "chunks" else (1,))]
        if degrees.pp > 1:
            schedules = [one for one in schedules if one[0] != "two-batch"] + [("two-batch", 1)] * space.pairs
        for transport, (schedule, chunks), dense, pipeline in product(
            transports,
            schedules,
            [one for one in space.data_parallel if replicates or one != "zero1"] or ["fsdp"],
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
            one = replace(
                base, transport=transport, schedule=schedule, chunks=chunks, data_parallel=dense, pipeline=pipeline
            )
            if self.system is not None and self.system.refine is not None:
                one = self.system.refine(one, self.problem.lengths(one))
            yield from self._that_fit(one)

    def _pipelines(self, base: Candidate) -> Iterator[str]:
        """The schedules of stages that can be."""
        pp = base.degrees.pp
        for one in self.space.pipelines:
            kind, why = SCHEDULES[one], None
            if pp * kind.stages > len(self.problem.model.layers):
                why = f"{one}: there are fewer layers than stages"
            elif self.problem.model.tied and not kind.is_v:
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
        kept = [(state, False) for state in self.space.optimizer_offload if False in self.space.optimizer_in_backward]
        used = [(state, True) for state in self.space.optimizer_offload if True in self.space.optimizer_in_backward]
        if used and (base.accumulation > 1 or base.schedule == "two-batch"):
            used = []
            if not kept:
                self.refused["the optimizer in the backward takes one micro-batch in a step"] += 1
        for state, in_backward in sorted(kept + used, key=_UPDATES.index):
            for policies in self.space.policies:
                if any(contained.items() <= policies.items() for contained in fitting):
                    self.counts["dominated"] += 1
                    continue
                if base.degrees.ep == 1 and "expert_inputs" in policies:
                    continue
                if base.schedule == "two-batch" and policies.get("moe_outputs") == "recompute":
                    continue
                one = replace(
                    base, policies={**KEEP, **policies}, optimizer_offload=state, optimizer_in_backward=in_backward
                )
                if (why := self.space.excluded(one.flat_settings())) is not None:
                    self.refused[why] += 1
                    continue
                total = self.memories.total(one, max(self.least, self.problem.memory, self.problem.capacity))
                self.least = min(self.least, total)
                if total > self.problem.memory:
                    self.counts["memory"] += 1
                    if total <= self.problem.capacity:
                        self.tight.append(one)
                    continue
                fitting.append(policies)
                yield one
