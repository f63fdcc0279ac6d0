"""The ride of a batch of tokens as one node of autograd, and as one operator of `torch.compile`.

Autograd sees the rows, the routing weights and the expert weights as inputs, and the sums as the output. What happens
inside, forward and backward, is written out in an `Order`: `plain.py`, or one of `carpool.schedule`.

With independent work beside the ride (`beside`: experts that serve every token) there are two nodes, and autograd runs
that work's backward between them:

    forward    start: plan, launch dispatch    | beside |            dispatch arrives, experts, combine
    backward   dispatch dy, experts' backward, launch combine        | beside's backward |    combine arrives

`torch.compile` sees an operator with these two as its forward and backward: `carpool.ride.operator`. A checkpointed
layer may be computed again without its rides: `carpool.memory.recompute`.

`ride_module` does the same for an expert module that our kernels do not know (any `forward(rows, ids, weights)`):
there dispatch and combine are two nodes, each the other's backward, and autograd differentiates what lies between.

Gradients of gradients are refused: the nodes' backwards build no graph, so second-order terms would be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from carpool.experts import ExpertWeights
from carpool.memory import Rows
from carpool.memory.recompute import kept_rides, taken_before
from carpool.observe.meter import Meter
from carpool.ride.operator import ride_operator
from carpool.ride.order import Kept
from carpool.ride.setup import RideSetup
from carpool.ride.turns import handover
from carpool.routing import Routing
from carpool.transport import Pending, Transport

Result = TypeVar("Result")


def ride(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    weights: ExpertWeights,
    setup: RideSetup,
    beside: Callable[[], Result] | None = None,
) -> tuple[torch.Tensor, Result | None]:
    """Send rows to their slots, compute, and bring the sums back.

    Args:
        x_TH: (T, H) rows; they travel in the dtype of the weights (under autocast, in autocast's). T may differ
            between ranks, and be 0.
        routing: with weights.
        slot_TK: (T, K) int32 global slot ids, -1: none (from `assign`).
        weights: of this rank's slots.
        setup: transport, experts, counters, order and hooks.
        beside: is called once the first rows are under way: work that does not wait for them, with gradients as always.
            Compiled, it is called before, for the compiler has an order of its own.

    Returns:
        y_TH: (T, H), the dtype that travelled. Differentiable in x, the routing's weights and those of the slots.
        What `beside` returned; None without it.

    Raises:
        ValueError: the order cannot be used with these experts or weights.
        RuntimeError: in a backward with create_graph=True.
    """
    expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
    assert weight_TK is not None
    device = x_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.up_SFH.dtype
    compiling, trip, result = torch.compiler.is_compiling(), None, None
    # The dtypes are those of the arguments: autocast would change them in the forward and not in the backward.
    with torch.autocast(device, enabled=False):
        x_TH = x_TH.to(dtype)
        weights = ExpertWeights._make(None if w is None else w.to(dtype) for w in weights)
        if beside is not None and not compiling and not taken_before():
            trip = _Trip()
            x_TH, weight_TK = _Start.apply(x_TH, weight_TK, slot_TK, weights, trip, setup)
            trip.apart = x_TH.requires_grad or weight_TK.requires_grad
    if beside is not None:
        result = beside()
    with torch.autocast(device, enabled=False):
        tensors = [t for t in (x_TH, weight_TK, *weights) if t is not None]
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if compiling:
            return ride_operator(x_TH, weight_TK, slot_TK, *weights, expert_TK, setup.number, backward)[0], result
        setup.stats.count(expert_TK, weight_TK)
        return _Ride.apply(x_TH, weight_TK, slot_TK, backward, setup, trip, *weights), result


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a node's backward that builds no graph.

    (`once_differentiable` refuses only where a gradient that comes in requires one itself. With a linear loss none
    does, and the terms of second order that lead through the weights would be left out silently.)"""

    def checked(ctx: Any, *gradients: Any) -> Any:
        # In a backward gradients are recorded exactly if it was called with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a MoE layer of Carpool has no gradients of gradients: call backward or autograd.grad without "
                "create_graph=True, or compute the second order by differences"
            )
        ctx.has_run = True
        return backward(ctx, *gradients)

    return checked


def backward_has_run(node: Any) -> bool:
    """Whether the backward of a ride has begun. node: `grad_fn` of what `ride` or `ride_module` returned."""
    return getattr(node, "has_run", False)


class _Trip:
    """What the two nodes of a ride with something beside it tell each other.

    Attributes:
        started: what `order.start` returned, until the second node has taken it.
        coming: the last combines of the backward, until the first node waits for them.
        apart: whether the backward has two nodes, too.
    """

    started: Any = None
    coming: Pending | None = None
    apart = False


class _Start(torch.autograd.Function):
    """Launches the first dispatches; in the backward, waits for the last combines."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        trip: _Trip,
        setup: RideSetup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The second node's gradients are no tensors yet when it is done.
        ctx.set_materialize_grads(False)
        ctx.trip = trip
        trip.started = setup.order.start(x_TH, weight_TK, slot_TK, weights, setup)
        return x_TH.detach(), weight_TK.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, *_: None) -> tuple[Any, ...]:
        coming, ctx.trip.coming = ctx.trip.coming, None
        return *((None, None) if coming is None else coming.wait()), None, None, None, None


class _Ride(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        backward: bool,
        setup: RideSetup,
        trip: _Trip | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = ExpertWeights._make(tensors)

        def take() -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
            if trip is None:
                started = setup.order.start(x_TH, weight_TK, slot_TK, weights, setup)
            else:
                started, trip.started = trip.started, None
            return setup.order.forward(started, weights, setup, backward)

        # Not `any(ctx.needs_input_grad)`, which is of the inputs alone: under no_grad it may be True too.
        region = kept_rides() if backward else None
        y_TH, kept = take() if region is None else region.ride(take)
        if kept is not None:
            _save(ctx, (*weights, *(item for one in kept for item in (one.x, *one.saved))))
            ctx.routes, ctx.setup, ctx.trip = [one.route for one in kept], setup, trip
        return y_TH

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        # Read once: with checkpointing each reading would run the forward again, and torch refuses the second.
        saved = _saved(ctx)
        weights, rest = ExpertWeights._make(saved[:4]), saved[4:]
        size = len(rest) // len(ctx.routes)
        kept = tuple(
            Kept(route, rest[i * size], rest[i * size + 1 : (i + 1) * size]) for i, route in enumerate(ctx.routes)
        )
        setup: RideSetup = ctx.setup
        needs_dweights = any(ctx.needs_input_grad[6:])
        coming, dweights = setup.order.backward(dy_TH, weights, kept, setup, needs_dweights)
        dx_TH = dweight_TK = None
        if ctx.trip is not None and ctx.trip.apart and _reaches(ctx.next_functions[:2]):
            ctx.trip.coming = coming
        else:
            dx_TH, dweight_TK = coming.wait()
        return dx_TH, dweight_TK, None, None, None, None, *(dweights or (None,) * 4)


def _reaches(functions: Any) -> bool:
    """Whether this backward goes on to one of these nodes: not where `torch.autograd.grad` wants weights alone."""
    return any(torch._C._will_engine_execute_node(node) for node, _ in functions if node is not None)


def _save(ctx: Any, what: tuple[Any, ...]) -> None:
    """Save tensors, `Rows` and Nones through autograd, which lets checkpointing and offloading see them."""
    tensors: list[torch.Tensor | None] = []
    for item in what:
        tensors += (item.data, item.start, item.home) if isinstance(item, Rows) else (item,)
    ctx.numbers = [(i.width, i.slab, i.home_row, i.gaps) if isinstance(i, Rows) else None for i in what]
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[Any, ...]:
    tensors = iter(ctx.saved_tensors)

    def rows(width: int, slab: int, home_row: int, gaps: bool) -> Rows:
        data, start, home = (next(tensors) for _ in range(3))
        return Rows(data, width, start, slab, home, home_row, gaps)

    return tuple(next(tensors) if numbers is None else rows(*numbers) for numbers in ctx.numbers)


# The module is whatever the model has: torch.compile compiles what is around it. (The same as `torch.compiler.disable`,
# but that imports the compiler at once.)
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

    def defined(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """(R, H): the rows, out of the transport's buffer, zero where no expert reads them."""
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
        if arrivals.rows.gaps:
            # A module may well multiply rows that nobody wants by zero. The same for gradients.
            trip.wanted_R1 = (arrivals.slot_RJ >= 0).any(1, keepdim=True)
        # Fresh handles, for autograd hangs its graph on what is returned: that must be neither the input itself (which
        # a single rank's arrivals may be) nor a tensor of the route, which the graph holds: neither would be freed.
        return trip.defined(arrivals.rows, x_TH.dtype).detach(), arrivals.weight_RJ.detach(), arrivals.slot_RJ

    @staticmethod
    @first_order
    def backward(ctx: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor, _: Any) -> tuple[Any, ...]:
        trip: _ModuleTrip = ctx.trip
        trip.route.backward = True
        with trip.meter.span("combine", dx_RH.device, direction="backward"):
            sums = trip.transport.combine_gradients(trip.route, dx_RH, dweight_RJ)
            handover()
            dx_TH, dweight_TK = sums.wait()
        return dx_TH.to(dx_RH.dtype), dweight_TK, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_RH: torch.Tensor, trip: _ModuleTrip) -> torch.Tensor:
        ctx.trip = trip
        sums = trip.transport.combine(trip.route, partial_RH)
        handover()
        return sums.wait().to(partial_RH.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        trip: _ModuleTrip = ctx.trip
        with trip.meter.span("dispatch", dy_TH.device, direction="backward"):
            coming = trip.transport.dispatch_gradients(dy_TH.contiguous(), trip.route)
            handover()
            return trip.defined(coming.wait(), dy_TH.dtype), None
