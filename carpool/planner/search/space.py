"""What a search is asked: the problem, and what may vary in its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from carpool.parallel.degrees import Degrees
from carpool.planner.configuration.candidate import Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.model.routes import Routes
from carpool.planner.model.shape import ModelShape
from carpool.planner.step.lengths import Lengths
from carpool.planner.transports import planned_transports

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
        routes: what tokens choose.
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
        policies: of what is kept, from those that cost no time on; what one leaves out is kept.
        pipelines, pairs: the orders of stages, and whether pairs of a forward and a backward may run at once.
        max_grad_norm, compiled, eager, moments, optimizer, stored, computed, experts: the same for all.
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
    stored: int = 2
    computed: int = 2
    experts: str = "grouped"
    pipelines: Sequence[str] = ("1F1B", "Interleaved1F1B", "DualPipeV")
    pairs: bool = True
    allowed: Callable[[Degrees], str | None] = field(default=lambda degrees: None)
    runs: Callable[[Candidate], str | None] = field(default=lambda candidate: None)
