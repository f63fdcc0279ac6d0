"""A ride in tiles: the experts begin on what has arrived, and what they have finished leaves, all in one ride.

A rank's tokens are cut into n ranges, the *parts*. There is one plan, one buffer and one order of pairs for all of
them; only the signals are by part. D: dispatch, up and down: the experts' products, C: combine; n = 3:

    rides         D0 D1 D2                      C0    C1    C2
    computation   choices, sort | up0  up1  up2 | down0 down1 down2

    1  choices    go ahead, in a kernel of the computation's stream: which row wants which expert, and is of which part
    2  rows       are sent part by part; after each, every program of the sender raises its flag to the part's number
    3  up         is one persistent kernel that walks the tiles of one part after the other, and waits in the kernel for
                  the flags of all ranks before it reads the rows of a part
    4  down       of a part, and the sums of its rows, are launched in turn; the combine of a part waits until all ranks
                  have written that part, while the next one is computed

The backward is the same with other products: gradients of rows are sent in parts, the product before the activation's
backward waits in the kernel, the gradients of a part's rows leave while the next are computed. The up projection's
weight gradient is one product over all parts at the end, and hides the last combine.

No deadlock: a kernel that waits leaves `transport.processors` multiprocessors to the ride's kernels, which therefore
always run; and whatever it waits for was enqueued before it, on every rank, and waits for nothing that comes after it.

Compared with chunks (`carpool/ride/chunks.py`): rows and pre-activations are kept once, there is one weight gradient,
and the first product is one launch whatever n is. As there, a part of an expert fills its last tile only partly.
Outputs and gradients of rows are those of the plain ride bit by bit, weight gradients to rounding
(`tiled_experts.py`).

Why it is here (docs/measurements.md, two H200): tiles beat 2 chunks or more at all of seven shapes, and lose to the
plain ride or to one chunk at each of them, because the multiprocessors reserved for rides cost more than the ride.

FLUX (arXiv 2406.06858) and COMET (2502.19811) give each tile of rows a signal and fuse the second product with the way
back in one kernel. Here a signal is for a part, so that a tile of an expert is not left with the few rows of one
sender, and the way back is a kernel of its own: it starts later by a launch, and needs no split of one grid.

Only transports that ride in parts have such signals, and only the fused kernels of `grouped` wait for them. On a CPU,
where no transport has them, the same number of chunks rides instead, so that a configuration runs there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from carpool.activations import HiddenStates
from carpool.experts import Experts, ExpertWeights, GroupedExperts
from carpool.kernels import MAX_PARTS
from carpool.kernels.device import reserved
from carpool.metrics.counters import RideSpans
from carpool.ride.chunks import arena_for, saved_inputs
from carpool.ride.schedule import Schedule, ScheduleKind
from carpool.ride.setup import Order, RideSetup, SavedActivations
from carpool.ride.turns import handover
from carpool.transport import Pending, Transport, TransportOptions
from carpool_systems.tiled_experts import Backward, Forward, why_no_parts


class Started(NamedTuple):
    """A ride whose rows are under way."""

    x_TH: torch.Tensor
    route: Any
    coming: Pending
    spans: RideSpans


def require(experts: Experts | None, weights: ExpertWeights) -> None:
    """Raise ValueError if these experts cannot compute on rows that come in parts."""
    assert experts is not None
    if reason := why_no_parts(experts, weights):
        raise ValueError(f"schedule='tiles' cannot be used here: {reason}; use schedule='chunks'")


@dataclass(frozen=True)
class TiledOrder:
    """A `carpool.ride.setup.Order`, over a transport that rides in parts; see the module's docstring.

    Attributes:
        parts: n.
    """

    parts: int

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Started:
        require(setup.experts, weights)
        transport: Any = setup.transport
        spans = setup.stats.meter.ride(x_TH.device, "forward", self.parts)
        setup.stats.tokens_dispatched += x_TH.shape[0]
        spans.begin("dispatch")
        route = transport.plan(slot_TK, weight_TK, setup.stats.traffic, self.parts)
        started = Started(x_TH, route, transport.dispatch(x_TH, route), spans)
        spans.end()
        return started

    def forward(
        self, started: Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        transport: Any = setup.transport
        experts = setup.experts
        assert isinstance(experts, GroupedExperts)
        x_TH, route, coming, spans = started
        activations: HiddenStates | None = None
        sums: list[Pending] = []
        handover()
        spans.begin("dispatch")
        arrivals = coming.wait()
        spans.begin("experts")
        with reserved(transport.processors):
            partial_RH = route.new_partial(x_TH.shape[1], x_TH.dtype, x_TH.device)
            work = Forward(
                experts, arrivals, weights, partial_RH, arena_for("expert_activations", setup, backward), backward
            )
        for part in range(self.parts):
            spans.begin("experts", part)
            with reserved(transport.processors):
                if backward and part == self.parts - 1:
                    # Before the rows' buffer goes to others, and when combines have most to hide behind.
                    activations = saved_inputs(x_TH, arrivals, setup)
                work.part(part)
            spans.begin("combine", part)
            sums.append(transport.combine(route, partial_RH, part))
        spans.end()
        handover()
        spans.begin("combine")
        y_TH = [one.wait() for one in sums][-1]
        spans.end()
        return y_TH.to(x_TH.dtype), None if activations is None else (SavedActivations(route, activations, work.saved),)

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        activations: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | None]:
        ((route, x, saved),) = activations
        transport: Any = setup.transport
        experts, hooks = setup.experts, setup.hooks
        assert isinstance(experts, GroupedExperts)
        spans = setup.stats.meter.ride(dy_TH.device, "backward", self.parts)
        again, rows = route.again() if setup.policies.expert_inputs == "resend" else None, None
        sums: list[Pending] = []
        spans.begin("dispatch")
        coming = transport.dispatch_gradients(dy_TH.contiguous(), route)
        if again is not None:
            rows = transport.dispatch_again(x.data, again)
        spans.end()
        handover()
        spans.begin("dispatch")
        dpartial = coming.wait()
        spans.begin("experts")
        with reserved(transport.processors):
            if rows is not None and experts.recompute:
                # The pre-activation is computed again from them.
                x, rows = rows.wait(), None
            dx_RH = route.new_partial(dy_TH.shape[1], dy_TH.dtype, dy_TH.device)
            work = Backward(experts, saved, x, weights, dpartial, route.ready, needs_dweights)
        spans.end()
        hooks.before_experts()
        for part in range(self.parts):
            spans.begin("experts", part)
            with reserved(transport.processors):
                if part == self.parts - 1:
                    # Before the gradients' buffer goes to others, and when combines have most to hide behind.
                    work.ddown()
                work.part(part, dx_RH)
            spans.begin("combine", part)
            sums.append(transport.combine_gradients(route, dx_RH, work.dweight_RJ, part))
        spans.begin("experts")
        with spans.named("weight-gradients", self.parts - 1), reserved(transport.processors):
            if rows is not None:
                x = rows.wait()
            dweights = work.dweights(x)
        if again is not None:
            spans.begin("combine")
            sums.insert(0, transport.discard(again, activations[0].x.data))
        spans.end()
        dtype = dy_TH.dtype

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            handover()
            spans.begin("combine")
            dx_TH, dweight_TK = [one.wait() for one in sums][-1]
            spans.end()
            return dx_TH.to(dtype), dweight_TK

        return Pending(finish), dweights


class Tiles(ScheduleKind):
    """`moe.schedule = "tiles"`."""

    name = "tiles"
    default_chunks = 4
    max_chunks = MAX_PARTS
    whole = False

    @classmethod
    def order(cls, schedule: Schedule, transport: Transport, device: torch.device) -> Order:
        if transport.rides_in_parts:
            return TiledOrder(schedule.chunks)
        # On a CPU nothing hides anything: the same number of chunks lets a configuration be tried there.
        if device.type == "cuda":
            raise ValueError(
                f"schedule='tiles' cannot be used here: transport {transport.name!r} has no signals by part; "
                "use schedule='chunks'"
            )
        return Schedule("chunks", schedule.chunks).order(transport, device)

    @classmethod
    def pieces(cls, schedule: Schedule) -> int:
        """All tokens are in one ride, and in one buffer."""
        return 1

    @classmethod
    def check_options(cls, options: TransportOptions) -> None:
        if not options.codecs.plain:
            raise ValueError(
                "hidden states that are sent as FP8 are not sent in tiles (schedule 'tiles'); use 'chunks', or "
                "leave out the codecs"
            )

    @classmethod
    def why_not(cls, experts: Experts, weights: ExpertWeights) -> str | None:
        return why_no_parts(experts, weights)

    @classmethod
    def candidates(cls, transport: Transport | None) -> Sequence[Schedule]:
        if transport is None or not transport.rides_in_parts:
            return ()
        return Schedule("tiles", 2), Schedule("tiles", 4)
