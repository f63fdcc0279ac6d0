"""What is computed on a row: one file per way. `base.py` says what an expert is; `reference.py` defines the answer."""

from __future__ import annotations

from collections.abc import Callable

from carpool.experts.base import (
    ACTIVATIONS,
    Activation,
    ExpertFunction,
    Experts,
    ExpertWeights,
    make_activation,
    reads_packets,
)
from carpool.experts.fp8 import FP8Experts
from carpool.experts.grouped import GroupedExperts
from carpool.experts.reference import ReferenceExperts, reference_experts

__all__ = [
    "ACTIVATIONS",
    "EXPERTS",
    "LOSSY_EXPERTS",
    "Activation",
    "ExpertFunction",
    "ExpertWeights",
    "Experts",
    "FP8Experts",
    "GroupedExperts",
    "ReferenceExperts",
    "make_activation",
    "make_experts",
    "reads_packets",
    "reference_experts",
]

EXPERTS: dict[str, Callable[[ExpertFunction], Experts]] = {cls.name: cls for cls in (GroupedExperts, ReferenceExperts)}
# These change the model's function, and say so.
LOSSY_EXPERTS: dict[str, Callable[[ExpertFunction], Experts]] = {FP8Experts.name: FP8Experts}


def make_experts(name: str, function: ExpertFunction) -> Experts:
    """Construct the expert computation `name` ("auto" is "grouped").

    Raises:
        ValueError: an unknown name, or a function that these experts do not compute."""
    if name == "auto":
        name = "grouped"
    known = EXPERTS | LOSSY_EXPERTS
    if name not in known:
        raise ValueError(f"experts={name!r} is not known; use 'auto' or one of {', '.join(known)}")
    return known[name](function)
