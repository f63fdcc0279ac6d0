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
from carpool.experts.choices import Choices, measure_choices
from carpool.experts.fp8 import FP8Experts
from carpool.experts.grouped import GroupedExperts
from carpool.experts.reference import ReferenceExperts, reference_experts

__all__ = [
    "ACTIVATIONS",
    "EXPERTS",
    "LOSSY_EXPERTS",
    "Activation",
    "Choices",
    "ExpertFunction",
    "ExpertWeights",
    "Experts",
    "FP8Experts",
    "GroupedExperts",
    "ReferenceExperts",
    "make_activation",
    "make_experts",
    "measure_choices",
    "reads_packets",
    "reference_experts",
]

EXPERTS: dict[str, Callable[[ExpertFunction], Experts]] = {cls.name: cls for cls in (GroupedExperts, ReferenceExperts)}
# These change the model's function, and say so.
LOSSY_EXPERTS: dict[str, Callable[[ExpertFunction], Experts]] = {FP8Experts.name: FP8Experts}


def make_experts(
    name: str, function: ExpertFunction, choices: Choices | None = None, recompute: bool = False
) -> Experts:
    """Construct the expert computation `name` ("auto" is "grouped").

    Args:
        choices, recompute: of "grouped" (`GroupedExperts`): the way of each stage; keep no pre-activation.

    Raises:
        ValueError: an unknown name, a function that these experts do not compute, or an option that they do not have.
    """
    if name == "auto":
        name = "grouped"
    known = EXPERTS | LOSSY_EXPERTS
    if name not in known:
        raise ValueError(f"experts={name!r} is not known; use 'auto' or one of {', '.join(known)}")
    if name == GroupedExperts.name:
        return GroupedExperts(function, choices, recompute)
    for option, asked in (("choices", choices is not None), ("recompute", recompute)):
        if asked:
            raise ValueError(f"experts={name!r} has no option {option!r}: leave it out, or use experts='grouped'")
    return known[name](function)
