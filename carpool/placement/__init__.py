"""Placement of experts: recorded routings, the cost of a layout, solvers, and when to move experts.

Needs no accelerator and no communication.
"""

from __future__ import annotations

from carpool.placement.objective import Objective, evaluate
from carpool.placement.predicted_volume import VERBS, Volume, predict
from carpool.placement.trace import LayerTrace, Trace
from carpool.planner.machine.cost import CostModel

__all__ = ["VERBS", "CostModel", "LayerTrace", "Objective", "Trace", "Volume", "evaluate", "predict"]
