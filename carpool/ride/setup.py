"""What the rides of a layer are made of, as one value.

    setup = RideSetup(transport, experts, LayerStats(num_experts, num_ranks, rank))
    y_TH, _ = ride(x_TH, routing, slot_TK, weights, setup)
    setup = replace(setup, hooks=hooks)        a change makes another value; rides under way keep the old one

A layer makes it once and keeps it: an operator in a compiled graph finds it by its number (`Numbered`).
"""

from __future__ import annotations

from dataclasses import dataclass

from carpool.experts import Experts
from carpool.kernels.numbered import Numbered
from carpool.memory import KEEP, KeptPolicies, Offloader
from carpool.observe.stats import LayerStats
from carpool.ride.hooks import NO_HOOKS, RideHooks
from carpool.ride.order import Order
from carpool.ride.owed import Owed
from carpool.ride.plain import PLAIN
from carpool.transport import Transport


@dataclass(frozen=True, eq=False)
class RideSetup(Numbered):
    """See the module's docstring.

    Attributes:
        transport: how rows travel.
        experts: what is computed on them; None for `ride_module`, which is given a module instead.
        stats: where the layer counts.
        order: when each verb runs (`carpool.schedule.orders.order_of` makes one of a `Schedule`).
        hooks: told where the backward is.
        policies: of what rides keep.
        offloader: where it goes, if a policy is "offload".
        owed: gets the weights' gradients, to be computed later. None: they come with the backward.
    """

    transport: Transport
    experts: Experts | None
    stats: LayerStats
    order: Order = PLAIN
    hooks: RideHooks = NO_HOOKS
    policies: KeptPolicies = KEEP
    offloader: Offloader | None = None
    owed: Owed | None = None
