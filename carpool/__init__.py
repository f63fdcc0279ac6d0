"""Carpool: expert-parallel training of Mixture-of-Experts models, in which tokens that go the same way share a ride.

`carpool.MoE` is the layer alone, for any framework. `import carpool.hf` registers it with Hugging Face Transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.activations import ActivationPolicies
    from carpool.activations.whole_layers import keep_rides
    from carpool.layer.module import reduce_gradients
    from carpool.layer.recorder import record
    from carpool.layout import ExpertLayout, assign
    from carpool.layout.layouts import Layouts
    from carpool.moe import MoE
    from carpool.ride.schedule import Schedule
    from carpool.routing import Router, Routing

__version__ = "0.2.0"

__all__ = [
    "ActivationPolicies",
    "ExpertLayout",
    "Layouts",
    "MoE",
    "Router",
    "Routing",
    "Schedule",
    "__version__",
    "assign",
    "keep_rides",
    "record",
    "reduce_gradients",
]
_PLACES = {
    "ExpertLayout": "layout",
    "ActivationPolicies": "activations",
    "Layouts": "layout.layouts",
    "MoE": "moe",
    "Router": "routing",
    "Routing": "routing",
    "Schedule": "ride.schedule",
    "assign": "layout",
    "keep_rides": "activations.whole_layers",
    "record": "layer.recorder",
    "reduce_gradients": "layer.module",
}


def __getattr__(name: str) -> Any:
    # Each when it is asked for: a process that only starts others, or shows a page, needs no PyTorch for it.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
