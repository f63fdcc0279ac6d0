"""Expert computations, one file each. `base.py` has the contract; `reference.py` defines the results.

`register` adds an expert computation from outside the package (`carpool.plugins`). `EXPERTS` is the only list.
"""

from __future__ import annotations

from typing import Any

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
from carpool.experts.gemm.choices import Choices
from carpool.experts.gemm.grouped import GroupedExperts
from carpool.experts.gemm.measure_choices import measure_choices
from carpool.experts.reference import ReferenceExperts, reference_experts
from carpool.plugins import Registry, unknown

__all__ = [
    "ACTIVATIONS",
    "EXPERTS",
    "Activation",
    "Choices",
    "ExpertFunction",
    "ExpertWeights",
    "Experts",
    "FP8Experts",
    "GroupedExperts",
    "ReferenceExperts",
    "exact_experts",
    "make_activation",
    "make_experts",
    "measure_choices",
    "reads_packets",
    "reference_experts",
    "register",
]


def _check(name: str, cls: type[Experts]) -> None:
    missing = [one for one in ("name", "forward", "backward") if not hasattr(cls, one)]
    if missing:
        raise ValueError(f"experts {name!r} ({cls!r}) have no {' and no '.join(missing)}: see carpool.experts.base")
    if cls.name != name:
        raise ValueError(f"experts {name!r}: the class is named {cls.name!r}; give both the same name")


# Those that change the model's function have `lossy_reasons`, and are last. Instances are made of an `ExpertFunction`
# and, as keyword arguments, of the `options` that the class names (`carpool train`: moe.expert_options).
EXPERTS: Registry[type[Any]] = Registry(
    "experts", "carpool.experts", {cls.name: cls for cls in (GroupedExperts, ReferenceExperts, FP8Experts)}, _check
)
register = EXPERTS.register


def exact_experts() -> tuple[str, ...]:
    """Names of the computations that equal the model's function up to rounding."""
    return tuple(name for name in EXPERTS if not getattr(EXPERTS[name], "lossy_reasons", ()))


def make_experts(
    name: str, function: ExpertFunction, choices: Choices | None = None, recompute: bool = False, **others: Any
) -> Experts:
    """Construct the expert computation `name` ("auto" is "grouped").

    Args:
        choices, recompute: for classes that name them in `options` (`GroupedExperts`): the kernel of each product;
            recompute pre-activations instead of saving them.
        others: further options of the class.

    Raises:
        ValueError: an unknown name, a function that these experts do not compute, or an option that they do not have.
    """
    if name == "auto":
        name = GroupedExperts.name
    if name not in EXPERTS:
        raise ValueError(unknown(EXPERTS, name, "auto"))
    cls = EXPERTS[name]
    asked = {"choices": choices, "recompute": recompute or None}
    given = {option: value for option, value in asked.items() if value is not None} | others
    for option in given:
        if option not in getattr(cls, "options", ()):
            instead = ", or use experts='grouped'" if option in asked else ""
            raise ValueError(f"experts={name!r} has no option {option!r}: leave it out{instead}")
    made: Experts = cls(function, **given)
    return made
