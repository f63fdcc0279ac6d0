"""What a search is asked: the problem, what may vary in its answer, and who else chooses.

    carpool plan --only ep=8,16 --only memory.layer_activations=save        constrains a `Space`
    carpool plan --policy NAME                                              another planner chooses (`PLANNERS`)

Constraints are those of nnScaler (Lin et al., OSDI 2024, section 4). A published planner is a policy of the search:
what it chooses is predicted as Carpool's own plan is, so that two plans differ in what was chosen and in nothing else.
`PLANNERS` is a registry for plug-ins (group "carpool.planners"):

    restrict    what the planner can choose among, of what Carpool can run
    refine      what it decides by a formula of its own, once degrees and micro-batch are given
    order       its own objective, where that is not the predicted step: the candidates, the best first
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import SCHEDULES
from carpool.planner.candidate import NO_SPARE, POLICIES, Candidate, Spare
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.lengths import Lengths
from carpool.planner.transports import planned_transports
from carpool.plugins import Registry
from carpool.plugins.nearest import did_you_mean

# From those that cost no time on. A later one is tried where none that it contains fits.
POLICY_SETS: tuple[Mapping[str, str], ...] = (
    {},
    {"expert_activations": "recompute"},
    {"expert_inputs": "resend"},
    {"expert_activations": "recompute", "expert_inputs": "resend"},
    {"expert_activations": "offload"},
    {"layer_activations": "recompute"},
    {"layer_activations": "recompute", "expert_activations": "recompute"},
    {"layer_activations": "recompute", "expert_activations": "recompute", "expert_inputs": "resend"},
    {"layer_activations": "recompute", "moe_outputs": "recompute"},
)


@dataclass(frozen=True)
class Problem:
    """What is given: a model, what it is trained on, and what a step is.

    Attributes:
        gpus: all of them.
        per_node: GPUs of a node, consecutive ranks.
        sequences, sequence_length: of a step, all GPUs together; tokens of each.
        memory: bytes that a rank may use.
        capacity: bytes that a rank has, where some of them are held back for what predictions miss.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int
    per_node: int
    sequences: int
    sequence_length: int
    memory: float
    routes: Routes
    capacity: float = 0.0

    def lengths(self, candidate: Candidate) -> Lengths:
        return Lengths(self.model, self.hardware, candidate, self.per_node, self.routes)


@dataclass(frozen=True)
class Space:
    """What may vary, as sequences of what is allowed, and what does not. Words are those of `Candidate`.

    Attributes:
        pp, tp, cp, etp, ep: sizes; an empty sequence: all that divide.
        replicas: copies of the sharded model; None: 1, and one for each node.
        micro_batches: sequences; None: all that divide a rank's.
        transports, schedules, data_parallel, optimizer_offload, optimizer_in_backward: choices, those that cost no time
            first.
        chunks: numbers of them, with schedule "chunks".
        policies: of saved activations, from those that cost no time on; what one leaves out is saved.
        pipelines, pairs: the orders of stages, and whether pairs of a forward and a backward may run at once.
        max_grad_norm, compiled, eager, moments, optimizer, averaged, stored, computed, experts, spare: the same for
            all.
        excluded: why settings do not go together, by SECTION.KEY; None: they do.
        allowed, runs: why some degrees, or a whole configuration that would be among the best, cannot be; None: it can.
    """

    pp: Sequence[int] = ()
    tp: Sequence[int] = (1, 2, 4, 8)
    cp: Sequence[int] = ()
    etp: Sequence[int] = (1, 2)
    ep: Sequence[int] = ()
    replicas: Sequence[int] | None = None
    micro_batches: Sequence[int] | None = None
    transports: Sequence[str] = field(default_factory=planned_transports)
    schedules: Sequence[str] = ("none", "two-batch")
    chunks: Sequence[int] = (2,)
    data_parallel: Sequence[str] = ("zero1", "fsdp")
    policies: Sequence[Mapping[str, str]] = POLICY_SETS
    optimizer_offload: Sequence[str] = ("none", "host")
    optimizer_in_backward: Sequence[bool] = (False,)
    max_grad_norm: float = 1.0
    compiled: bool = True
    eager: str | None = None
    moments: str = "float32"
    optimizer: str = "one-pass"
    averaged: bool = False
    stored: int = 2
    computed: int = 2
    experts: str = "grouped"
    spare: Spare = NO_SPARE
    pipelines: Sequence[str] = ("1F1B", "Interleaved1F1B", "DualPipeV")
    pairs: bool = True
    excluded: Callable[[Mapping[str, Any]], str | None] = field(default=lambda settings: None)
    allowed: Callable[[Degrees], str | None] = field(default=lambda degrees: None)
    runs: Callable[[Candidate], str | None] = field(default=lambda candidate: None)


# What `--only` calls it, and the field of `Space`.
ONLY: Mapping[str, str] = MappingProxyType({
    **{axis: axis for axis in ("pp", "tp", "cp", "etp", "ep")},
    "dp_replicate": "replicas", "micro_batch": "micro_batches", "transport": "transports", "schedule": "schedules",
    "data_parallel": "data_parallel", "optimizer_offload": "optimizer_offload",
    "optimizer_in_backward": "optimizer_in_backward",
    "pp_schedule": "pipelines",
    **{f"memory.{item}": "policies" for item in POLICIES},
})  # fmt: skip
_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "schedules": ("none", "chunks", "two-batch"),
    "data_parallel": ("zero1", "fsdp"),
    "optimizer_offload": ("none", "host"),
    "optimizer_in_backward": ("false", "true"),
    "pipelines": tuple(SCHEDULES),
})  # fmt: skip
NUMBERS = ("pp", "tp", "cp", "etp", "ep", "replicas", "micro_batches")


def _known(field: str) -> tuple[str, ...]:
    if field == "transports":
        from carpool.transport import between_ranks

        return between_ranks()
    return _KNOWN[field]


def constrained(space: Space, only: Mapping[str, Sequence[Any]]) -> Space:
    """A space of which some fields have only these values, in the order of the space, which is that of what they cost.

    Raises:
        ValueError: a field has none of them."""
    default = Space()
    changed: dict[str, Any] = {}
    for name, values in only.items():
        now = getattr(space, name)
        kept = [one for one in now or () if one in values]
        if not now or now == getattr(default, name):
            kept += [one for one in values if one not in kept]
        if not kept:
            raise ValueError(
                f"{name}: none of {', '.join(map(str, values))} is among what is allowed: {', '.join(map(str, now))}"
            )
        changed[name] = tuple(kept)
    return replace(space, **changed)


def _none_of(one: str, unknown: Sequence[str], known: Iterable[str]) -> str:
    hint = did_you_mean(unknown[0], known)
    return f"--only {one}: {', '.join(unknown)} is none of {', '.join(known)}{hint}"


def read_constraints(space: Space, given: Iterable[str]) -> Space:
    """Of "ep=8,16" and "memory.layer_activations=save".

    Raises:
        ValueError: a name or a value that does not exist."""
    for one in given:
        name, _, text = one.partition("=")
        if name not in ONLY or not text:
            hint = did_you_mean(name, ONLY) if name not in ONLY else ""
            raise ValueError(f"--only {one}: expected NAME=VALUES such as ep=8,16; names are {', '.join(ONLY)}{hint}")
        words = [word.strip() for word in text.split(",")]
        field = ONLY[name]
        if field == "policies":
            item = name.removeprefix("memory.")
            if unknown := [word for word in words if word not in POLICIES[item]]:
                raise ValueError(_none_of(one, unknown, POLICIES[item]))
            space = replace(space, policies=tuple(p for p in space.policies if p.get(item, "save") in words))
            if not space.policies:
                raise ValueError(f"--only {one}: no policies of activations are left")
            continue
        values: list[Any] = words
        if field in NUMBERS:
            if not all(word.isdigit() and int(word) for word in words):
                raise ValueError(f"--only {one}: {name} is a positive number, or several with commas between them")
            values = [int(word) for word in words]
        elif unknown := sorted(set(words) - set(_known(field))):
            raise ValueError(_none_of(one, unknown, _known(field)))
        elif field == "optimizer_in_backward":
            values = [word == "true" for word in words]
        space = constrained(space, {field: values})
    return space


LengthsOf = Callable[[Candidate], Lengths]


@dataclass(frozen=True)
class Planner:
    """Another planner; see the module's docstring.

    Attributes:
        source: the paper, and where in it.
        chooses: for people, what it does otherwise than Carpool's search.
        space: values of fields of `Space` that it chooses among; others stay as they are.
        allowed: of a model, GPUs and degrees: why it would not have them; None: it may.
        moves: it goes through the space by moves (`carpool.planner.search.moves`).
    """

    source: str
    chooses: str
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    allowed: Callable[[ModelShape, Degrees], str | None] | None = None
    refine: Callable[[Candidate, Lengths], Candidate] | None = None
    order: Callable[[Sequence[Candidate], LengthsOf], list[Candidate]] | None = None
    moves: bool = False

    def restrict(self, space: Space, model: ModelShape) -> Space:
        """The part of a space that it chooses among.

        Raises:
            ValueError: nothing is left of it."""
        found = constrained(space, self.space)
        if (rule := self.allowed) is None:
            return found
        own = rule
        return replace(found, allowed=lambda degrees: space.allowed(degrees) or own(model, degrees))


PLANNERS: Registry[Planner] = Registry("planner", "carpool.planners", {})
# `carpool plan --moves`.
MOVES = Planner("Liu et al., EuroSys 2024 (Aceso)", "moves away from the bottleneck, one after the other", moves=True)
