"""What the rides of a layer are made of, as one value; the contract of an order, and what it keeps.

    setup = RideSetup(transport, experts, LayerStats(num_experts, num_ranks, rank))
    y_TH, _ = ride(x_TH, routing, slot_TK, weights, setup)
    setup = replace(setup, hooks=hooks)        a change makes another value; rides under way keep the old one

A layer makes it once and keeps it: an operator in a compiled graph finds it by its number (`Numbered`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from carpool.activations import KEEP, KeptPolicies, Offloader, Rows
from carpool.experts import Experts, ExpertWeights
from carpool.kernels.numbered import Numbered
from carpool.observe.stats import LayerStats
from carpool.ride.hooks import NO_HOOKS, RideHooks
from carpool.ride.owed import Owed
from carpool.transport import Pending, Transport


class Kept(NamedTuple):
    """What the forward of a ride, or of one chunk of it, keeps for its backward besides the parameters.

    Attributes:
        route: as planned.
        x: the rows that arrived; the rows that were sent, if they will be sent again.
        saved: what the experts keep: tensors, `Rows` and Nones. The `Rows` are pre-activations.
    """

    route: Any
    x: Rows
    saved: tuple[Any, ...]


class Order(Protocol):
    """In which order a ride asks for its verbs, and what it keeps for the backward. Runs without autograd.

        started   = order.start(x, weight, slot, weights, setup)          plan; ask for what can leave at once
        y, kept   = order.forward(started, weights, setup, backward)      experts, combine
        coming, dweights = order.backward(dy, weights, kept, setup, ...)  the same in reverse; `coming.wait()` ends it

    An order never changes what is computed. `carpool.ride.chunks` has the order without a schedule;
    `carpool.schedule` has others.
    """

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


@dataclass(frozen=True, eq=False)
class RideSetup(Numbered):
    """See the module's docstring.

    Attributes:
        transport: how rows travel.
        experts: what is computed on them; None for `ride_module`, which is given a module instead.
        stats: where the layer counts.
        order: when each verb runs (`carpool.schedule.orders.order_of` makes one of a `Schedule`). None: the plain one.
        hooks: told where the backward is.
        policies: of what rides keep.
        offloader: where it goes, if a policy is "offload".
        owed: gets the weights' gradients, to be computed later. None: they come with the backward.
    """

    transport: Transport
    experts: Experts | None
    stats: LayerStats
    order: Order | None = None
    hooks: RideHooks = NO_HOOKS
    policies: KeptPolicies = KEEP
    offloader: Offloader | None = None
    owed: Owed | None = None
