"""What is computed on a row: one file per way. `base.py` says what an expert is; `reference.py` defines the answer."""

from __future__ import annotations

from carpool.experts.base import ACTIVATIONS, Activation, ExpertFunction, Experts, ExpertWeights, make_activation
from carpool.experts.grouped import GroupedExperts
from carpool.experts.reference import ReferenceExperts, reference_experts

__all__ = [
    "ACTIVATIONS",
    "EXPERTS",
    "Activation",
    "ExpertFunction",
    "ExpertWeights",
    "Experts",
    "GroupedExperts",
    "ReferenceExperts",
    "make_activation",
    "make_experts",
    "reference_experts",
]

EXPERTS = {cls.name: cls for cls in (GroupedExperts, ReferenceExperts)}


def make_experts(name: str, function: ExpertFunction) -> Experts:
    """Construct the expert computation `name` ("auto" is "grouped"). Raises ValueError for an unknown name."""
    if name == "auto":
        name = "grouped"
    if name not in EXPERTS:
        raise ValueError(f"experts={name!r} is not known; use 'auto' or one of {', '.join(EXPERTS)}")
    return EXPERTS[name](function)
