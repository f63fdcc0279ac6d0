"""What plans of spare slots weigh. Without PyTorch: the planner reads it, too."""

from __future__ import annotations

from dataclasses import dataclass

# The cost of one choice's computation, forward and backward. Other costs are in these units.
WORK = 16
# Fewer than 2^31 choices, times these, and the index that a kernel keeps beside them, are below 2^63.
LARGEST = {"trip": 2**20, "fetch": 2**30, "limit": 2**30}


@dataclass(frozen=True)
class Costs:
    """What a plan weighs, in sixteenths of the expert computation of one choice, forward and backward together.

    Attributes:
        trip: of a choice that comes from another rank.
        fetch: of an expert that a rank fetches or sends: its weights twice, and its gradient.
        limit: load of a rank that the plan must not exceed if it can be helped, in thousandths of the mean; 0: none.

    Raises:
        ValueError: one is negative or too large: a trip above 2^20, which is 65,536 computations, for example.
    """

    trip: int = 0
    fetch: int = 0
    limit: int = 0

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            if not 0 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} of a plan's costs must be from 0 to {largest}, not {getattr(self, name)}")
