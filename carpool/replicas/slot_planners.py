"""What plans of spare slots may follow: `SLOT_PLANNERS`, by the names of moe.spare_plan.

    balance    `plan_slots`: no rank has more than others, where slots suffice and fetching pays
    node       the same inside each node: experts that cross to other nodes cost more than they save on many networks

A further one is a class, whose instance serves one layer:

    @register
    class EverywhereOnce(SlotPlanner):
        name = "everywhere-once"

        def plan(self, load_WE, home_E, spare, costs, node_W): ...      a `SlotPlan`

It is declared as an entry point of the group "carpool.slot_planners" (`carpool.plugins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from carpool.plugins import Registry
from carpool.replicas.slot_costs import Costs
from carpool.replicas.slot_plan import SlotPlan, plan_slots


class SlotPlanner:
    """Plans the spare slots of one layer. Every rank has one, and all get the same numbers in the same order, so they
    may remember earlier ones, and must come to the same plan.

    Attributes:
        name: what moe.spare_plan says.
        options: the types of what the class takes, by name (moe.spare_options).
        on_host: it reads the loads on the host, so that steps are not captured.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    on_host: ClassVar[bool] = False

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        """The plan of a micro-batch; arguments as of `carpool.replicas.slot_plan.plan_slots`.

        Of a rank's choices of an expert, its own replica serves as many as the plan gives that replica; the plan must
        name an expert at most once for each rank, and never where its home is."""
        raise NotImplementedError


class Balance(SlotPlanner):
    name = "balance"

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        return plan_slots(load_WE, home_E, spare, costs)


class BalanceNode(SlotPlanner):
    name = "node"

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        return plan_slots(load_WE, home_E, spare, costs, node_W)


SLOT_PLANNERS: Registry[type[SlotPlanner]] = Registry(
    "slot planner", "carpool.slot_planners", {kind.name: kind for kind in (Balance, BalanceNode)}, base=SlotPlanner
)
register = SLOT_PLANNERS.register
