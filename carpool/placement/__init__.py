"""Where experts should live: traces of a routing, what a layout costs on them, solvers, and when to move.

Needs no accelerator and nothing that moves rows.
"""

from __future__ import annotations

from carpool.placement.objective import Objective, evaluate
from carpool.placement.predicted_volume import VERBS, Volume, predict
from carpool.placement.trace import LayerTrace, Trace
from carpool.planner.machine.cost import CostModel

__all__ = ["VERBS", "CostModel", "LayerTrace", "Objective", "Trace", "Volume", "evaluate", "predict"]
