"""What layouts are predicted to do in a run: `carpool.placement.objective` with the run's sizes and predicted loads.

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
from carpool.planner.machine.cost import RIDES, CostModel
from carpool.planner.machine.hardware import Hardware
from carpool.transport import find_transport
from carpool.transport.base import CHOICE_BYTES, GRADIENT_BYTES
from carpool.transport.codecs import PLAIN, Codecs


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
        codecs: how rows become bytes.
        speeds: of the ranks of the group; (): all are equal.
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
    codecs: Codecs = PLAIN
    speeds: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "topology": self.topology.to_dict()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Facts:
        links, rates = Topology.from_dict(settings["topology"]), Hardware.from_dict(settings["hardware"])
        codecs = Codecs(**settings.get("codecs", {}))
        speeds = tuple(settings.get("speeds", ()))
        return cls(**{**settings, "topology": links, "hardware": rates, "codecs": codecs, "speeds": speeds})

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
            codecs=self.codecs,
            speeds=self.speeds,
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


def outlook(found: Sequence[Objective], facts: Facts) -> dict[str, float]:
    """What is foretold of all layers, as the metrics measure it: remote rows per token and the fullest rank's load,
    mean over layers; remote bytes per token, over all layers. Rows that fill up a fixed number, as of
    `hierarchical`, are not foretold."""
    cost, choices = facts.cost, find_transport(facts.transport).choices_per_row(facts.top_k)
    near, far = (
        RIDES * cost.row_bytes_over(network) + choices * (CHOICE_BYTES + GRADIENT_BYTES) for network in (False, True)
    )
    sent = [(one.rows_remote - one.rows_nodes) * near + one.rows_nodes * far for one in found]
    return {
        "rows": float(np.mean([one.rows_remote / one.tokens for one in found])),
        "bytes": float(sum(size / one.tokens for size, one in zip(sent, found, strict=True))),
        "load": float(np.mean([one.load_ratio for one in found])),
    }
