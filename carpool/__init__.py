"""Carpool: expert-parallel training of Mixture-of-Experts models, in which tokens that go the same way share a ride.

`carpool.MoE` is the layer alone, for any framework. `import carpool.hf` registers it with Hugging Face Transformers.
"""

from __future__ import annotations

from carpool.layout import ExpertLayout, assign
from carpool.layouts import Layouts
from carpool.memory.recompute import keep_rides
from carpool.moe import MoE
from carpool.parallel.gradients import reduce_gradients
from carpool.routing import Router, Routing
from carpool.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "ExpertLayout",
    "Layouts",
    "MoE",
    "Router",
    "Routing",
    "Schedule",
    "__version__",
    "assign",
    "keep_rides",
    "reduce_gradients",
]
