"""The contract of an order: in which order a ride asks for its verbs, and what it keeps for the backward.

    started   = order.start(x, weight, slot, weights, setup)          plan; ask for what can leave at once
    y, kept   = order.forward(started, weights, setup, backward)      experts, combine
    coming, dweights = order.backward(dy, weights, kept, setup, ...)  the same in reverse; `coming.wait()` ends it

An order never changes what is computed. `plain.py` is the order without a schedule; `carpool.schedule` has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from carpool.experts import ExpertWeights
from carpool.ride.kept import Kept
from carpool.transport import Pending

if TYPE_CHECKING:
    from carpool.ride.setup import RideSetup


class Order(Protocol):
    """See the module's docstring. Runs without autograd."""

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Any:
        """Plan the ride and launch the first dispatches. Returns what `forward` continues with.

        Raises:
            ValueError: this order cannot be used with these experts or weights. Nothing has been launched then."""
        ...

    def forward(
        self, started: Any, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
        """(y_TH, what is kept). `backward`: whether one will follow; if not, nothing is kept."""
        ...

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        kept: tuple[Kept, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        """(the last combines, whose `wait()` gives dx_TH and dweight_TK; gradients of the weights if needed, or, with
        `setup.owed`, what computes them)."""
        ...
