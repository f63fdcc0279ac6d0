"""The plain ride: one batch of tokens goes out, is computed on, and comes back.

    forward    plan   dispatch x    experts              combine
    backward          dispatch dy   experts' backward    combine (dx, dweight), beside it the last weight gradient

This is what every schedule computes (`carpool.schedule` only changes the order). With a transport that works on a
stream of its own, the up projection's weight gradient hides the backward's combine (delayed weight gradients:
Megatron's, and LANCET's, arXiv 2404.19429). With `RideSetup.owed` it is not computed here at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from carpool.activations import Arrivals, Rows
from carpool.experts import ExpertWeights, reads_packets
from carpool.kernels.device import reserved
from carpool.observe.meter import RideSpans
from carpool.ride.kept import arena_for
from carpool.ride.setup import Kept, Order, RideSetup
from carpool.ride.turns import handover
from carpool.transport import Pending


class Started(NamedTuple):
    """A plain ride whose rows are under way."""

    x_TH: torch.Tensor
    route: Any
    coming: Pending
    span: RideSpans


class PlainOrder:
    """An `Order`; see the module's docstring."""

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Started:
        stats, transport = setup.stats, setup.transport
        span = stats.meter.ride(x_TH.device, "forward")
        stats.tokens_dispatched += x_TH.shape[0]
        with span("dispatch"):
            route = transport.plan(slot_TK, weight_TK, stats.traffic)
            return Started(x_TH, route, transport.dispatch(x_TH, route), span)

    def forward(
        self, started: Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
        x_TH, route, coming, span = started
        transport, experts = setup.transport, setup.experts
        assert experts is not None
        handover()
        with span("dispatch"):
            arrivals = coming.wait().readable(reads_packets(experts), x_TH.dtype)
        with span("experts"):
            partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
            arena = arena_for("hidden", setup, backward)
            saved = experts.forward(arrivals, weights, partial_RH, arena, backward)
            kept = None
            if backward:
                kept = (Kept(route, kept_rows(x_TH, arrivals, setup), saved),)
        with span("combine"):
            sums = transport.combine(route, partial_RH)
        handover()
        with span("combine"):
            y_TH = sums.wait()
        return y_TH.to(x_TH.dtype), kept

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        kept: tuple[Kept, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        ((route, x, saved),) = kept
        transport, experts, hooks = setup.transport, setup.experts, setup.hooks
        assert experts is not None
        span = setup.stats.meter.ride(dy_TH.device, "backward")
        with span("dispatch"):
            again, rows, gradients = start_backward(kept[0], dy_TH.contiguous(), setup)
        handover()
        with span("dispatch"):
            packets = reads_packets(experts)
            if rows is not None:
                x = readable(rows.wait(), packets, dy_TH.dtype)
            dpartial = readable_gradients(gradients.wait(), packets, dy_TH.dtype)
        hooks.before_experts()
        with span("experts"):
            dx_RH = route.new_partial(dy_TH.shape[1], dy_TH.dtype, dy_TH.device)
            dweight_RJ, last = experts.backward(saved, x, weights, dpartial, dx_RH, needs_dweights)
            # Rows that were sent again are in a buffer of the transport's, which others get next.
            dweights: ExpertWeights | Callable[[], ExpertWeights] | None = None
            if last is not None and again is not None:
                dweights = last()
        with span("combine"):
            if again is not None:
                transport.discard(again, kept[0].x.data).wait()
            sums = transport.combine_gradients(route, dx_RH, dweight_RJ)
        if last is not None and again is None:
            compute = partial(_last_gradients, last, span, transport.processors)
            # Rows that were offloaded are in memory that the next backward's get.
            waits = setup.owed is not None and setup.policies.rows == "save"
            dweights = compute if waits else compute()
        dtype = dy_TH.dtype

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            handover()
            with span("combine"):
                dx_TH, dweight_TK = sums.wait()
            return dx_TH.to(dtype), dweight_TK

        return Pending(finish), dweights


PLAIN = PlainOrder()


def ride_order(setup: RideSetup) -> Order:
    """In which order a ride asks for its verbs."""
    return PLAIN if setup.order is None else setup.order


def _last_gradients(last: Callable[[], ExpertWeights], span: RideSpans, processors: int) -> ExpertWeights:
    with span("experts"), span.named("weight-gradients", 0), reserved(processors):
        return last()


class BackwardStarted(NamedTuple):
    """What a backward waits for: the gradients; and the rows if they are sent again, by a route of their own."""

    again: Any
    rows: Pending | None
    gradients: Pending


def kept_rows(x_TH: torch.Tensor, arrivals: Arrivals, setup: RideSetup) -> Rows:
    """The rows that a ride keeps: those that arrived; of rows that will be sent again, those that are sent."""
    if setup.policies.rows == "resend":
        return Rows.of(x_TH)
    return arrivals.rows.kept(arena_for("rows", setup))


def start_backward(kept: Kept, dy_TH: torch.Tensor, setup: RideSetup) -> BackwardStarted:
    """Send the gradients to the experts, and the rows once more if they are not kept."""
    again = rows = None
    transport = setup.transport
    if setup.policies.rows == "resend":
        again = kept.route.again()
        rows = transport.dispatch_again(kept.x.data, again)
    return BackwardStarted(again, rows, transport.dispatch_gradients(dy_TH, kept.route))


def readable(rows: Rows, packets: bool, dtype: torch.dtype) -> Rows:
    """Rows as the experts read them."""
    return rows.packed() if packets else rows.widened(dtype)


def readable_gradients(dpartial: Rows, packets: bool, dtype: torch.dtype) -> Rows:
    """Gradients as the experts read them: as packets of FP8 only if they travelled so, else in `dtype`."""
    return dpartial if packets else dpartial.widened(dtype)
