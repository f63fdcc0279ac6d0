"""The ride around an expert module without kernels of ours (any `forward(tokens, ids, weights)`).

Dispatch and combine are two nodes of autograd, each the other's backward, and autograd differentiates the module
between them:

    forward     dispatch x     module              combine
    backward    combine dx     module's backward   dispatch dy

Such a ride is always plain, and gradients of gradients are refused, as in `function.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from carpool.activations import HiddenStates
from carpool.metrics.counters import Meter
from carpool.ride.function import first_order
from carpool.ride.setup import RideSetup
from carpool.ride.turns import handover
from carpool.routing import Routing
from carpool.transport import Transport


# torch.compile leaves out the module, which may be anything. (The same as `torch.compiler.disable`, which would import
# the compiler at once.)
@torch._disable_dynamo
def ride_module(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    module: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    setup: RideSetup,
) -> torch.Tensor:
    """As `ride`, with `module(x_RH, slot_RJ, weight_RJ) -> partial_RH` as the experts (-1 in slot_RJ: none).

    The setup's experts, order and hooks are not used: such a ride is always plain."""
    weight_TK, transport, stats = routing.weight_TK, setup.transport, setup.stats
    assert weight_TK is not None
    stats.count(routing.expert_TK, weight_TK)
    stats.tokens_dispatched += x_TH.shape[0]
    with stats.meter.span("dispatch", x_TH.device):
        trip = _ModuleTrip(transport, stats.meter, transport.plan(slot_TK, weight_TK.detach(), stats.traffic))
        x_RH, weight_RJ, slot_RJ = _Dispatch.apply(x_TH, weight_TK, trip)
    with stats.meter.span("experts", x_TH.device):
        partial_RH = module(x_RH, slot_RJ, weight_RJ)
    with stats.meter.span("combine", x_TH.device):
        return _Combine.apply(partial_RH.to(x_TH.dtype), trip)


@dataclass
class _ModuleTrip:
    """What the two nodes of `ride_module` share.

    Attributes:
        wanted_R1: (R, 1) bool, True where at least one expert reads the row; other rows are uninitialised. None: every
            row is defined.
    """

    transport: Transport
    meter: Meter
    route: Any
    wanted_R1: torch.Tensor | None = None

    def defined(self, rows: HiddenStates, dtype: torch.dtype) -> torch.Tensor:
        """(R, H): a copy of the transport's buffer, zero in rows that no expert reads."""
        rows_RH = rows.widened(dtype).contiguous(self.route.num_rows)
        return rows_RH if self.wanted_R1 is None else rows_RH.masked_fill(~self.wanted_R1, 0.0)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, weight_TK: torch.Tensor, trip: _ModuleTrip) -> Any:
        coming = trip.transport.dispatch(x_TH, trip.route)
        handover()
        arrivals = coming.wait()
        ctx.trip = trip
        ctx.mark_non_differentiable(arrivals.slot_RJ)
        if arrivals.tokens.gaps:
            # A module may multiply rows that no expert reads by zero, which must not give NaN. The same for gradients.
            trip.wanted_R1 = (arrivals.slot_RJ >= 0).any(1, keepdim=True)
        # Detached, because autograd attaches its graph to the outputs. These must be neither the input itself (which a
        # single rank's arrivals may be) nor a tensor of the route, which the graph references: a cycle.
        return trip.defined(arrivals.tokens, x_TH.dtype).detach(), arrivals.weight_RJ.detach(), arrivals.slot_RJ

    @staticmethod
    @first_order
    def backward(ctx: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor, _: Any) -> tuple[Any, ...]:
        trip: _ModuleTrip = ctx.trip
        trip.route.backward = True
        with trip.meter.span("combine", dx_RH.device, direction="backward"):
            combining = trip.transport.combine_gradients(trip.route, dx_RH, dweight_RJ)
            handover()
            dx_TH, dweight_TK = combining.wait()
        return dx_TH.to(dx_RH.dtype), dweight_TK, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_RH: torch.Tensor, trip: _ModuleTrip) -> torch.Tensor:
        ctx.trip = trip
        combining = trip.transport.combine(trip.route, partial_RH)
        handover()
        return combining.wait().to(partial_RH.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        trip: _ModuleTrip = ctx.trip
        with trip.meter.span("dispatch", dy_TH.device, direction="backward"):
            coming = trip.transport.dispatch_gradients(dy_TH.contiguous(), trip.route)
            handover()
            return trip.defined(coming.wait(), dy_TH.dtype), None
