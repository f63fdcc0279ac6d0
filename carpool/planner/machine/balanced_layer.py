"""What spare slots make of a layer's load and time, modelled from the choices of every rank.

    modelled = model_layer(expert_WTK, layout, 2, cost)
    modelled.before, modelled.after      load of the fullest rank over the mean, without and with two spare slots
    modelled.seconds                     of forward and backward, by `carpool.planner.machine.cost`

Loads, replicas and rows are exact: they are those of the plan that a ride would make of these choices
(`carpool.replicas.slot_plan`). Seconds follow from rates. A fetch is beside the products of experts at home, forward
and backward: what exceeds the time of these counts, and so do gradients of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from carpool.planner.machine.cost import GEMM_PASSES, RIDES, CostModel, slot_costs
from carpool.planner.transports import transport_class

if TYPE_CHECKING:
    import torch

    from carpool.layout import ExpertLayout
    from carpool.layout.topology import Topology


@dataclass(frozen=True)
class ModelledLayer:
    """Attributes:
    before, after: load of the fullest rank over the mean, without and with spare slots.
    replicas: experts fetched by all ranks.
    seconds: of one layer, forward and backward: computation of the fullest rank, rides, and what replicas take that
        no product hides.
    """

    before: float
    after: float
    replicas: int
    compute_seconds: float
    ride_seconds: float
    replica_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.ride_seconds + self.replica_seconds


def model_layer(
    expert_WTK: Sequence[torch.Tensor],
    layout: ExpertLayout,
    spare: int,
    cost: CostModel,
    *,
    topology: Topology | None = None,
    limit: float | None = 1.1,
) -> ModelledLayer:
    """Model one layer.

    Args:
        expert_WTK: for each rank, the choices of its tokens, (T, K) int32, -1: none.
        layout: whose slots are homes.
        spare: spare slots of each rank; 0: none.
        cost: sizes and rates; one row travels for each rank that a token visits.
        topology: None: one node.
        limit: moe.balance_limit.
    """
    import torch

    from carpool.layout.topology import Topology
    from carpool.replicas.slot_plan import SlotPlan, count_choices, plan_slots, served_by

    ranks, topology = layout.num_ranks, topology or Topology.even(layout.num_ranks)
    home_E = torch.tensor([rank for rank, _ in layout.home_of])
    load_WE = torch.stack([count_choices(expert_TK, layout.num_experts) for expert_TK in expert_WTK])
    before_W = torch.zeros(ranks, dtype=torch.int64).index_add(0, home_E, load_WE.long().sum(0))
    plan = SlotPlan(torch.full((ranks, 1), -1, dtype=torch.int32), torch.zeros(ranks, 1, dtype=torch.int32), before_W)
    if spare:
        top_k = max(1, expert_WTK[0].shape[1])
        shared = transport_class(cost.transport).ranks_per_token(layout.num_experts, top_k, ranks) / top_k
        flops, row_bytes = cost.pair_seconds * cost.hardware.flops, shared * RIDES * cost.row_bytes
        costs = slot_costs(cost.hardware, topology, flops, row_bytes, 3 * cost.expert_bytes)
        plan = plan_slots(load_WE, home_E, spare, replace(costs, limit=round(1000 * (limit or 0))))
    rows_WW, sent_WW = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    for rank, expert_TK in enumerate(expert_WTK):
        slot_TK = served_by(expert_TK, load_WE, home_E, plan, rank)
        by_TK = torch.where(slot_TK < 0, home_E[expert_TK.clamp(min=0).long()], slot_TK // plan.expert_WS.shape[1])
        visits_TW = torch.zeros(len(expert_TK), ranks + 1, dtype=torch.bool)
        visits_TW.scatter_(1, torch.where(expert_TK < 0, ranks, by_TK).long(), True)
        rows_WW[rank] = visits_TW[:, :ranks].sum(0).numpy()
    for rank, experts in enumerate(plan.expert_WS.tolist()):
        for expert in experts:
            if expert >= 0:
                sent_WW[int(home_E[expert]), rank] += cost.expert_bytes
    mean = max(1, int(load_WE.sum())) / ranks
    replica_seconds = 0.0
    if sent_WW.any():
        # A third of the work at home is before replicas compute, on the rank that fetches and has least of it.
        home_W = (plan.load_W - plan.choices_WS.sum(1))[(plan.expert_WS >= 0).any(1)]
        beside = float(home_W.min()) * cost.pair_seconds / GEMM_PASSES
        fetch = cost.transfer_seconds(sent_WW, topology)
        # There in the forward and in the backward, and the gradient home.
        replica_seconds = 2 * max(0.0, fetch - beside) + cost.transfer_seconds(sent_WW.T, topology)
    return ModelledLayer(
        float(before_W.max()) / mean,
        float(plan.load_W.max()) / mean,
        int((plan.expert_WS >= 0).sum()),
        cost.compute_seconds(plan.load_W.numpy()),
        cost.ride_seconds(rows_WW, topology),
        replica_seconds,
    )
