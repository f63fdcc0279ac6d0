"""What layouts are foretold to do in a run: the model of `carpool.placement.objective` with the run's sizes, loads as
they are predicted, and parts named after the ranks where most of their experts are already.

Rates are those of a hardware profile, not of a measurement in this run: an answer that depended on the clock would make
two runs differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from carpool.layout import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.objective import Objective, evaluate, served_by
from carpool.placement.policies import LoadModel
from carpool.placement.trace import Array, LayerTrace
from carpool.placement.volume import SLOT_AND_WEIGHT, WEIGHT_GRADIENT
from carpool.planner.cost import RIDES, CostModel
from carpool.planner.hardware import Hardware


@dataclass(frozen=True)
class Facts:
    """What the cost of a layout depends on, beside the routing.

    Attributes:
        transport: how rows travel.
        topology: of the expert-parallel group.
        tokens: of a rank, in a micro-batch;  micro_batches: of a step.
        top_k: K.
        hidden: H.
        element_size: bytes of an element of a row, or of a weight, as they are computed with.
        expert_elements: of an expert's weights in one layer.
        hardware: rates of links and matrix products.
    """

    transport: str
    topology: Topology
    tokens: int
    micro_batches: int
    top_k: int
    hidden: int
    element_size: int
    expert_elements: int
    hardware: Hardware

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "topology": self.topology.to_dict()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Facts:
        links, rates = Topology.from_dict(settings["topology"]), Hardware.from_dict(settings["hardware"])
        return cls(**{**settings, "topology": links, "hardware": rates})

    @property
    def num_nodes(self) -> int:
        """Nodes over which the group is spread, equally many consecutive ranks on each; ValueError if it is not so."""
        return self.topology.even_nodes()

    @property
    def cost(self) -> CostModel:
        """Of a layer and a micro-batch. F is that of experts with three matrices: those of two have as many elements
        with another F."""
        return CostModel(
            hidden=self.hidden,
            expert_hidden=max(1, self.expert_elements // (3 * self.hidden)),
            element_size=self.element_size,
            tokens_per_rank=self.tokens,
            hardware=self.hardware,
            transport=self.transport,
        )

    @property
    def load_model(self) -> LoadModel:
        """The same for policies that know loads alone."""
        return LoadModel(self.cost, self.top_k, self.topology)


def foretell(judge: LayerTrace, layout: ExpertLayout, load_E: Array, facts: Facts) -> Objective:
    """Rows as they are in a trace; loads as `load_E` foretells them, choices of each expert in the coming steps, each
    expert's divided among its copies as in the trace."""
    found = evaluate(judge, layout, topology=facts.topology, cost=facts.cost)
    # An expert that the sample lacks has no weight in it.
    weight_E = load_E[: judge.num_experts] * (judge.load_E.sum() / max(1.0, load_E.sum())) / np.maximum(1, judge.load_E)
    rank_TK = served_by(judge, layout)
    load_W = np.bincount(rank_TK.ravel(), weights=weight_E[judge.expert_TK].ravel(), minlength=layout.num_ranks)
    scale = facts.tokens * layout.num_ranks / judge.num_tokens
    return replace(found, load_W=load_W, compute_seconds=facts.cost.compute_seconds(load_W * scale))


def outlook(found: Sequence[Objective], facts: Facts) -> dict[str, float | None]:
    """What is foretold of all layers, as the metrics measure it: remote rows per token and the fullest rank's load,
    mean over layers; remote bytes per token, over all layers. Rows and bytes: those of one row per (token, rank)."""
    rows = [one.rows_remote / one.tokens for one in found]
    row = RIDES * facts.hidden * facts.element_size + facts.top_k * (SLOT_AND_WEIGHT + WEIGHT_GRADIENT)
    shared = facts.transport in ("dedup", "nvlink")
    return {
        "rows": float(np.mean(rows)) if shared else None,
        "bytes": float(sum(rows) * row) if shared else None,
        "load": float(np.mean([one.load_ratio for one in found])),
    }


def aligned(found: ExpertLayout, current: ExpertLayout, num_nodes: int) -> ExpertLayout:
    """The same parts on other ranks and rows, so that few homes move: ranks are named by where most of their experts
    are already, nodes first. Experts that stay on their rank keep their rows, and slots begin with the homes.

    Example: found homes [[2, 3], [0, 1]], current [[0, 1], [3, 2]]  ->  [[0, 1], [3, 2]]
    """
    per_node = found.num_ranks // num_nodes
    common_WW = np.array([[len(set(a) & set(b)) for b in current.homes] for a in found.homes])
    common_NN = common_WW.reshape(num_nodes, per_node, num_nodes, per_node).sum((1, 3))
    target = [0] * found.num_ranks
    for node, other in enumerate(_pairs(common_NN)):
        inside_RR = common_WW[node * per_node :, other * per_node :][:per_node, :per_node]
        for rank, place in enumerate(_pairs(inside_RR)):
            target[node * per_node + rank] = other * per_node + place
    homes, slots = [()] * found.num_ranks, [()] * found.num_ranks  # type: list[tuple[int, ...]], list[tuple[int, ...]]
    for rank, place in enumerate(target):
        homes[place] = _in_rows(found.homes[rank], current.homes[place])
        computed = set(found.slots[rank])
        kept = tuple(e for e in homes[place] if e in computed)
        slots[place] = kept + tuple(e for e in found.slots[rank] if e not in kept)
    return ExpertLayout(tuple(homes), tuple(slots))


def _in_rows(experts: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """`experts` in an order in which those that `rows` has too are in the same places, as far as there are places."""
    if len(experts) != len(rows):
        return tuple(experts)
    new = iter([e for e in experts if e not in rows])
    return tuple(e if e in experts else next(new) for e in rows)


def _pairs(common_XX: Array) -> list[int]:
    """For each row a column of its own, the largest numbers first."""
    chosen = [-1] * len(common_XX)
    order = np.argsort(-common_XX, axis=None, kind="stable")
    taken: set[int] = set()
    for row, column in zip(*np.unravel_index(order, common_XX.shape), strict=True):
        if chosen[row] == -1 and int(column) not in taken:
            chosen[row] = int(column)
            taken.add(int(column))
    return chosen
