"""A configuration on any number of GPUs: every axis as it is, but for the data-parallel one that grows.

fsdp 8, ep 8 on 64 GPUs    ->  fsdp 2,048, ep 8 on 16,384: parameters are sharded over all of them
fsdp 8, 8 copies on 64     ->  fsdp 8, 2,048 copies
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from carpool.parallel.degrees import Degrees
from carpool.planner.configuration.candidate import Candidate
from carpool.planner.machine.hardware import Hardware
from carpool.planner.memory.peak import memory_of
from carpool.planner.model.shape import ModelShape
from carpool.planner.simulator.sampling import Spread
from carpool.planner.step.events import Graph, Group
from carpool.planner.step.graph import step_graph
from carpool.planner.step.lengths import Lengths
from carpool.planner.transports import transport_class


@dataclass(frozen=True)
class Step:
    """A configuration on some number of GPUs.

    Attributes:
        gpus: all ranks.
        graph: of a step, as balanced ranks do it.
        spread: over what the tokens of a stage spread.
        tokens: of a step, all ranks together.
        label: the degrees of parallelism, for people.
        memory: bytes of the fullest rank; None: not known.
    """

    gpus: int
    graph: Graph
    spread: Spread
    tokens: int
    label: str
    memory: float | None = None

    @property
    def ranks(self) -> int:
        """Of a stage."""
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
    each = way.choices_per_row(max(2, shape.top_k)) == 1
    spread = Spread(
        ranks=degrees.stage_size,
        group=group,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        tokens=candidate.rank_tokens // (2 if halves else 1),
        ranks_per_node=per_node,
        one_row_for="expert" if each else "node" if way.one_row_per_node else "rank",
    )
    memory = memory_of(shape, candidate).total
    label = candidate.label.partition(",")[0]
    return Step(gpus, step_graph(lengths), spread, candidate.tokens, label, memory)
