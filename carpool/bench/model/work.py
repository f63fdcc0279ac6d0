"""What a step has to do at the least, by kind of kernel, from the model's configuration: its roofline.

With T tokens of a rank, H hidden, V words, L layers, W ranks, e bytes of a number:

    experts         6 operations for each parameter of the K experts that a token visits
    dense           6 for each other parameter that multiplies it, the output head's included
    attention       6 S heads head_dim for each token and layer: causal, at half
    loss            logits are read once, and their gradients written once: 2 e T V bytes
    optimizer       8 numbers of each of the rank's own parameters: the parameter and two moments read and written, its
                    gradient read twice (once for the norm)
    elementwise     a residual sum and its norm read and write four rows of H, twice in a layer, and as much again in
                    the backward: 16 e T H L bytes
    rides           one row of H for each token and rank that it visits, if choices are uniform, there and back, and the
                    same for gradients
    communication   gradients of parameters that several ranks hold go out once, and parameters come back once

Operations are divided by the device's peak, bytes by the bandwidth of its memory or of the link (`planner.hardware`).
Nothing reaches these times; what is many times slower than its own is where to look.
"""

from __future__ import annotations

from dataclasses import dataclass

from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.hardware import Hardware
from carpool.train.blueprint import ModelSize, flops_per_token
from carpool.transport import find_transport


@dataclass(frozen=True)
class Sizes:
    """What of a step decides how much there is to do.

    Attributes:
        tokens: T, of one rank in the whole step.
        layers, moe_layers: all of them, and those with experts.
        number_bytes: e of activations; parameter_bytes: of parameters.
    """

    model: ModelSize
    degrees: Degrees
    tokens: int
    sequence: int
    hidden: int
    vocabulary: int
    layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    number_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Work:
    """Of one kind, in a step of one rank: operations, bytes of memory, bytes that the rank sends."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0


def work_of(sizes: Sizes) -> dict[str, Work]:
    """By kind of `carpool.profile.kinds.KINDS`; kinds that nothing needs (copies) are missing."""
    model, degrees, tokens = sizes.model, sizes.degrees, sizes.tokens
    visited = model.active - (model.total - model.experts)
    attention = flops_per_token(model, sizes.sequence) - 6 * model.multiplied
    dense_own = (model.total - model.experts) / degrees.dense_shards
    experts_own = model.experts / degrees.expert_shards
    copies = degrees.etp * find_transport("dedup").copies_per_token(sizes.num_experts, sizes.top_k, degrees.ep)
    remote = copies * (degrees.expert_ranks - 1) / degrees.expert_ranks
    row = sizes.hidden * sizes.number_bytes
    shared_dense = (model.total - model.experts) * (degrees.dense_shards - 1) / degrees.dense_shards
    shared_experts = model.experts / degrees.expert_ranks * (degrees.efsdp - 1) / degrees.efsdp
    return {
        "experts": Work(flops=6 * tokens * visited),
        "dense": Work(flops=6 * tokens * (model.multiplied - visited)),
        "attention": Work(flops=tokens * attention),
        "loss": Work(memory_bytes=2 * tokens * sizes.vocabulary * sizes.number_bytes),
        "optimizer": Work(memory_bytes=8 * (dense_own + experts_own) * sizes.parameter_bytes),
        "elementwise": Work(memory_bytes=16 * tokens * row * sizes.layers),
        "rides": Work(sent_bytes=4 * tokens * remote * row * sizes.moe_layers),
        "communication": Work(sent_bytes=2 * (shared_dense + shared_experts) * sizes.parameter_bytes),
    }


def roofline_ms(work: Work, hardware: Hardware, topology: Topology, peak: float | None) -> float | None:
    """The least milliseconds that it can take; None where a rate is not known.

    Args:
        topology: of all ranks; the slowest link among them counts.
        peak: FLOP/s of the device.
    """
    if peak is None or hardware.memory is None:
        return None
    links = {topology.link(0, other) for other in range(1, topology.num_ranks)}
    slowest = min((hardware.rate(link).bytes_per_second for link in links), default=None)
    seconds = work.flops / peak + work.memory_bytes / hardware.memory
    return 1e3 * (seconds + (work.sent_bytes / slowest if slowest is not None else 0.0))
