"""The best configurations of a model on a cluster: everything is enumerated, and most of it is never predicted.

    found = plan(shape, find_hardware("H100"), gpus=64, per_node=8, tokens=4 * 2**20, sequence_length=4096)
    found.plans[0].prediction.seconds, found.plans[0].memory.total, found.plans[0].candidate.settings()

    enumerated    degrees x micro-batch x transport x ... (`enumeration.py`), of a space (`space.py`)
    dominated     saves memory that a faster one of the same degrees does not need either
    memory        does not fit (`carpool.planner.step.peak`)
    bound         what each stream has to do takes longer than the best steps found so far in full (`Bounds`)
    predicted     its event graph is run (`carpool.planner.step`), of many micro-batches the first ones

Nothing that is dropped can be the best, so the result is that of predicting all (`tests/planner/test_search.py` does).
What is left to the run itself, because it measures better: saved activations in finer grain, chunks."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from carpool.planner.candidate import Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.search.enumeration import Bounds, Enumeration
from carpool.planner.search.moves import Place, relieve
from carpool.planner.search.space import Planner, Problem, Space
from carpool.planner.step.peak import Peak, memory_of
from carpool.planner.step.prediction import Prediction, inputs, predict, step_seconds

# Of the memory of a device: the rest is for what the prediction misses.
USABLE = 0.92
# How many of those that need the rest, too, are predicted.
TIGHT = 64


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
        tight: one that is faster than all plans, and needs some of what is held back of a device's memory; None: none.
    """

    plans: tuple[Plan, ...]
    counts: Mapping[str, int]
    seconds: float
    least_memory: float
    refused: Mapping[str, int]
    tight: Plan | None = None


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
    system: Planner | None = None,
) -> Found:
    """The fastest configurations that fit.

    Args:
        tokens: of a step, all GPUs together.
        per_node: GPUs of a node, consecutive ranks.
        memory: bytes that a rank may use; None: what the device has.
        routes: what tokens choose; None: uniform.
        space: what may vary; None: all that is known.
        best: how many to return.
        system: a published planner, whose choices these are (`carpool.planner.search.space`); None: the fastest.

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
    capacity = memory
    if memory is None:
        capacity = hardware.capacity
        if hardware.capacity is None:
            raise ValueError(
                f"the memory of {hardware.name} is not known: say what a rank may use, such as --memory 70GiB"
            )
        memory = USABLE * hardware.capacity
    problem = Problem(
        model, hardware, gpus, per_node, tokens // sequence_length, sequence_length, memory, routes, capacity or memory
    )
    enumeration = Enumeration(problem, space, system)
    search = Search(enumeration, Bounds(problem), best)
    search.run()

    def planned(one: Prediction) -> Plan:
        memory = memory_of(model, one.candidate, routes, True)
        return Plan(one.candidate, one, memory, inputs(hardware, one.candidate, routes, model))

    plans, tight = tuple(map(planned, search.sorted_best())), search.fastest_tight()
    counts, refused = enumeration.counts + search.counts, enumeration.refused + search.refused
    return Found(
        plans,
        dict(counts),
        time.perf_counter() - began,
        enumeration.least,
        dict(refused),
        None if tight is None else planned(tight),
    )


class Search:
    """The best of what is enumerated: the fastest, or as a published planner goes about it.

    Attributes:
        counts: configurations by what became of them, of those that fit: "predicted", "bound", "ordered".
        refused: why configurations that would be among the best cannot run, and how many.
        found: a heap of (-seconds, number, candidate), the slowest of the best first.
    """

    def __init__(self, enumeration: Enumeration, bounds: Bounds, best: int) -> None:
        self.enumeration, self.bounds, self.best = enumeration, bounds, best
        self.problem, self.system = enumeration.problem, enumeration.system
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.found: list[tuple[float, int, Candidate]] = []

    def sorted_best(self) -> list[Prediction]:
        """Those that were found, the fastest first; of a system with an order of its own, in that."""
        found = [self._prediction(one) for _, _, one in self.found]
        own_order = self.system is not None and self.system.order is not None
        return found if own_order else sorted(found, key=lambda one: one.seconds.middle)

    def run(self) -> None:
        """Fills `found`."""
        if self.system is not None and self.system.moves:
            self._relieve()
        elif self.system is not None and (order := self.system.order) is not None:
            ordered = order(list(self.enumeration.candidates()), self.problem.lengths)
            best = islice(filter(self._runs, ordered), self.best)
            self.found = [(0.0, number, one) for number, one in enumerate(best)]
            self.counts["ordered"] += len(ordered)
        else:
            self._fastest()

    def _fastest(self) -> None:
        number = count()
        waiting = [(self.bounds.seconds(one), next(number), one) for one in self.enumeration.candidates()]
        heapq.heapify(waiting)
        while waiting:
            bound, _, candidate = heapq.heappop(waiting)
            if len(self.found) == self.best and bound >= -self.found[0][0]:
                self.counts["bound"] += 1 + len(waiting)
                return
            seconds = self._predicted(candidate, bound)
            if (len(self.found) == self.best and seconds >= -self.found[0][0]) or not self._runs(candidate):
                continue
            heapq.heappush(self.found, (-seconds, next(number), candidate))
            if len(self.found) > self.best:
                heapq.heappop(self.found)

    def fastest_tight(self) -> Prediction | None:
        """The fastest of `Enumeration.tight`, of those with the least bounds, if all that were found are slower."""
        if self.system is not None or not self.found:
            return None
        best, fastest = min(-seconds for seconds, *_ in self.found), None  # type: float, Candidate | None
        bounds = [(self.bounds.seconds(one), number, one) for number, one in enumerate(self.enumeration.tight)]
        for bound, _, one in heapq.nsmallest(TIGHT, bounds):
            if bound >= best:
                break
            if (seconds := self._predicted(one, bound)) < best and self._runs(one):
                best, fastest = seconds, one
        return None if fastest is None else self._prediction(fastest)

    def _predicted(self, candidate: Candidate, bound: float) -> float:
        """Seconds of its step."""
        self.counts["predicted"] += 1
        # Of a step that waits for the host, the first layers are too few to tell.
        problem = self.problem
        return max(bound, step_seconds(problem.model, problem.hardware, candidate, problem.per_node, problem.routes))

    def _runs(self, candidate: Candidate) -> bool:
        if reason := self.enumeration.space.runs(candidate):
            self.refused[reason] += 1
        return not reason

    def _relieve(self) -> None:
        """By moves away from the bottleneck (`moves.py`), from experts that are spread over a node."""
        places = {Place(one.degrees, one.micro_batch): one for one in self.enumeration.bases()}
        if not places:
            return
        start = min(
            places,
            key=lambda one: (
                one.size("pp") * one.size("tp") * one.size("cp"),
                one.size("micro_batch"),
                abs(one.size("ep") - self.problem.per_node),
                one.size("dp_replicate"),
            ),
        )
        found = relieve(places, self, start)
        if found is not None:
            self.found = [(0.0, 0, found)]

    def best_of(self, base: Candidate) -> tuple[float, Candidate] | None:
        """(seconds, the fastest variant of these degrees that fits); None: none does."""
        found: tuple[float, Candidate] | None = None
        for one in self.enumeration.variants(base):
            bound = self.bounds.seconds(one)
            if found is None or bound < found[0]:
                seconds = self._predicted(one, bound)
                if (found is None or seconds < found[0]) and self._runs(one):
                    found = seconds, one
        return found

    def exposed(self, candidate: Candidate) -> Mapping[str, float]:
        """Seconds of its step, by kind of event; of its first micro-batches."""
        fewer = replace(candidate, accumulation=min(candidate.accumulation, 2 * candidate.degrees.pp))
        return self._prediction(fewer).exposed

    def _prediction(self, candidate: Candidate) -> Prediction:
        problem = self.problem
        return predict(problem.model, problem.hardware, candidate, problem.per_node, problem.routes)
