"""The ride of a batch of tokens: plan, dispatch, experts, combine, as one autograd function.

Autograd sees a single node with the rows, the routing weights and the expert weights as inputs. Inside, forward and
backward are written out (`carpool.schedule.chunks`, `tiles`), so that it is plain what travels when and what is kept:

    forward    plan -> dispatch x -> experts -> combine partial sums
    backward   dispatch dy -> experts' backward -> combine (dx, dweight)

With independent work beside the ride (`beside`: experts that serve every token) there are two nodes, and autograd runs
that work's backward between them:

    forward    plan -> ask for dispatch | beside | dispatch comes -> experts -> combine
    backward   dispatch dy -> experts' backward -> ask for combine | beside's backward | combine comes

`torch.compile` sees an operator with these two as its forward and backward: `carpool.ride.operator`. A checkpointed
layer may be computed again without its rides: `carpool.memory.recompute`.

`ride_module` does the same for an expert module that our kernels do not know (any `forward(rows, ids, weights)`):
there dispatch and combine are two nodes, each the other's backward, and autograd differentiates what lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from carpool.experts import Experts, ExpertWeights
from carpool.memory import Rows
from carpool.memory.recompute import kept_rides, taken_before
from carpool.observe.stats import LayerStats, Meter
from carpool.ride.operator import ride_operator
from carpool.ride.turns import handover
from carpool.routing import Routing
from carpool.schedule import chunks as in_chunks
from carpool.schedule.chunks import Arrival, Kept
from carpool.schedule.tiles import Departed, depart, require, ride_backward, ride_forward
from carpool.transport import Transport
from carpool.transport.base import parts_of


def ride(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    transport: Transport,
    experts: Experts,
    weights: ExpertWeights,
    stats: LayerStats,
    chunks: int = 1,
    beside: Callable[[], None] | None = None,
    backward_chunks: int | None = None,
) -> torch.Tensor:
    """Send rows to their slots, compute, and bring the sums back.

    Args:
        x_TH: (T, H) rows; they travel in the dtype of the weights (under autocast, in autocast's). T may differ
            between ranks, and be 0.
        routing: with weights.
        slot_TK: (T, K) int32 global slot ids, -1: none (from `assign`).
        weights: of this rank's slots.
        chunks: pieces in which the tokens ride, one beside the computation of another (`carpool.schedule`), where the
            transport does not ride in parts (`NVLinkOptions.parts`).
        beside: is called once the first rows are under way: work that does not wait for them, with gradients as always.
            Compiled, it is called before, for the compiler has an order of its own.
        backward_chunks: pieces of the backward, if not as many.

    Returns:
        y_TH: (T, H), the dtype that travelled. Differentiable in x, the routing's weights and those of the slots.
    """
    expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
    assert weight_TK is not None
    device = x_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.up_SFH.dtype
    compiling, trip, pieces = torch.compiler.is_compiling(), None, (chunks, backward_chunks or chunks)
    # The dtypes are those of the arguments: autocast would change them in the forward and not in the backward.
    with torch.autocast(device, enabled=False):
        x_TH = x_TH.to(dtype)
        weights = ExpertWeights._make(None if w is None else w.to(dtype) for w in weights)
        # While nothing is under way.
        if not compiling and parts_of(transport):
            require(transport, experts, weights)
        if beside is not None and not compiling and not taken_before():
            trip = _Trip()
            x_TH, weight_TK = _Depart.apply(x_TH, weight_TK, slot_TK, trip, transport, stats, pieces)
            trip.apart = x_TH.requires_grad or weight_TK.requires_grad
    if beside is not None:
        beside()
    with torch.autocast(device, enabled=False):
        tensors = [t for t in (x_TH, weight_TK, *weights) if t is not None]
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if compiling:
            numbers = transport.number, experts.number, stats.number
            return ride_operator(x_TH, weight_TK, slot_TK, *weights, expert_TK, *numbers, backward, *pieces)[0]
        stats.count(expert_TK, weight_TK)
        return _Ride.apply(x_TH, weight_TK, slot_TK, backward, pieces, transport, experts, stats, trip, *weights)


class _Trip:
    """What the two nodes of a ride with something beside it tell each other.

    Attributes:
        departed: the forward's, until its second part has begun.
        arrive: waits for the end of the backward, whose first part has been.
        apart: whether the backward has two nodes, too.
    """

    departed: Departed | in_chunks.Departed | None = None
    arrive: Arrival | None = None
    apart = False


class _Depart(torch.autograd.Function):
    """Asks for the first dispatches; in the backward, waits for what comes last."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        trip: _Trip,
        transport: Transport,
        stats: LayerStats,
        pieces: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The second node's gradients are no tensors yet when it is done.
        ctx.set_materialize_grads(False)
        ctx.trip = trip
        trip.departed = depart(x_TH, weight_TK, slot_TK, transport, stats, *pieces)
        return x_TH.detach(), weight_TK.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> tuple[Any, ...]:
        arrive, ctx.trip.arrive = ctx.trip.arrive, None
        return *((None, None) if arrive is None else arrive()), None, None, None, None, None


class _Ride(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        backward: bool,
        pieces: tuple[int, int],
        transport: Transport,
        experts: Experts,
        stats: LayerStats,
        trip: _Trip | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = ExpertWeights._make(tensors)
        parts = transport, experts, stats

        def take() -> tuple[torch.Tensor, tuple[Kept, ...] | None]:
            if trip is None:
                departed = depart(x_TH, weight_TK, slot_TK, transport, stats, *pieces)
            else:
                assert trip.departed is not None
                departed, trip.departed = trip.departed, None
            return ride_forward(departed, weights, transport, experts, backward)

        # Not `any(ctx.needs_input_grad)`, which is of the inputs alone: under no_grad it may be True too.
        region = kept_rides() if backward else None
        y_TH, kept = take() if region is None else region.ride(take)
        if kept is not None:
            _save(ctx, (*weights, *(item for one in kept for item in (one.x, *one.saved))))
            ctx.routes, ctx.parts, ctx.trip = [one.route for one in kept], parts, trip
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        # Read once: with checkpointing each reading would run the forward again, and torch refuses the second.
        saved = _saved(ctx)
        weights, rest = ExpertWeights._make(saved[:4]), saved[4:]
        size = len(rest) // len(ctx.routes)
        kept = tuple(
            Kept(route, rest[i * size], rest[i * size + 1 : (i + 1) * size]) for i, route in enumerate(ctx.routes)
        )
        transport, experts, stats = ctx.parts
        needs_dweights = any(ctx.needs_input_grad[9:])
        arrive, dweights = ride_backward(dy_TH, weights, kept, transport, experts, stats, needs_dweights)
        dx_TH = dweight_TK = None
        if ctx.trip is not None and ctx.trip.apart and _reaches(ctx.next_functions[:2]):
            ctx.trip.arrive = arrive
        else:
            dx_TH, dweight_TK = arrive()
        return dx_TH, dweight_TK, None, None, None, None, None, None, None, *(dweights or (None,) * 4)


def _reaches(functions: Any) -> bool:
    """Whether this backward goes on to one of these nodes: not where `torch.autograd.grad` wants weights alone."""
    return any(torch._C._will_engine_execute_node(node) for node, _ in functions if node is not None)


def _save(ctx: Any, what: tuple[Any, ...]) -> None:
    """Save tensors, `Rows` and Nones through autograd, which lets checkpointing and offloading see them."""
    tensors: list[torch.Tensor | None] = []
    for item in what:
        tensors += (item.data, item.start, item.home) if isinstance(item, Rows) else (item,)
    ctx.numbers = [(i.width, i.slab, i.home_row) if isinstance(i, Rows) else None for i in what]
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[Any, ...]:
    tensors = iter(ctx.saved_tensors)

    def rows(width: int, slab: int, home_row: int) -> Rows:
        data, start, home = (next(tensors) for _ in range(3))
        return Rows(data, width, start, slab, home, home_row)

    return tuple(next(tensors) if numbers is None else rows(*numbers) for numbers in ctx.numbers)


# The module is whatever the model has: torch.compile compiles what is around it. (The same as `torch.compiler.disable`,
# but that imports the compiler at once.)
@torch._disable_dynamo
def ride_module(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    transport: Transport,
    module: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    stats: LayerStats,
) -> torch.Tensor:
    """As `ride`, with `module(x_RH, slot_RJ, weight_RJ) -> partial_RH` as the experts (-1 in slot_RJ: none)."""
    weight_TK = routing.weight_TK
    assert weight_TK is not None
    stats.count(routing.expert_TK, weight_TK)
    stats.tokens_dispatched += x_TH.shape[0]
    with stats.meter.span("dispatch", x_TH.device):
        route = transport.plan(slot_TK, weight_TK.detach(), stats.traffic)
        x_RH, weight_RJ, slot_RJ = _Dispatch.apply(x_TH, weight_TK, route, transport, stats.meter)
    with stats.meter.span("experts", x_TH.device):
        partial_RH = module(x_RH, slot_RJ, weight_RJ)
    with stats.meter.span("combine", x_TH.device):
        return _Combine.apply(partial_RH.to(x_TH.dtype), route, transport, stats.meter)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, weight_TK: torch.Tensor, route: Any, transport: Transport, meter: Meter
    ) -> Any:
        coming = transport.dispatch(x_TH, route)
        handover()
        arrivals = coming.wait().widened(x_TH.dtype)
        ctx.route, ctx.transport, ctx.meter = route, transport, meter
        ctx.mark_non_differentiable(arrivals.slot_RJ)
        if not arrivals.sums_unwanted:
            # A row that nobody wants may hold anything; a module may well multiply it by zero. The same for gradients.
            route.wanted_R1 = (arrivals.slot_RJ >= 0).any(1, keepdim=True)
            return _wanted(arrivals.rows, route), arrivals.weight_RJ, arrivals.slot_RJ
        # Fresh handles, for autograd hangs its graph on what is returned: that must be neither the input itself (which
        # a single rank's arrivals may be) nor a tensor of the route, which the graph holds: neither would be freed.
        return arrivals.x_RH.detach(), arrivals.weight_RJ.detach(), arrivals.slot_RJ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor, _: Any) -> tuple[Any, ...]:
        ctx.route.backward = True
        ctx.route.partial_RH = dx_RH
        with ctx.meter.span("combine", dx_RH.device, direction="backward"):
            sums = ctx.transport.combine_gradients(ctx.route, dweight_RJ)
            handover()
            dx_TH, dweight_TK = sums.wait()
        return dx_TH.to(dx_RH.dtype), dweight_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_RH: torch.Tensor, route: Any, transport: Transport, meter: Meter) -> torch.Tensor:
        ctx.route, ctx.transport, ctx.meter = route, transport, meter
        route.partial_RH = partial_RH
        sums = transport.combine(route)
        handover()
        return sums.wait().to(partial_RH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        with ctx.meter.span("dispatch", dy_TH.device, direction="backward"):
            coming = ctx.transport.dispatch_gradients(dy_TH.contiguous(), ctx.route)
            handover()
            dpartial_RH = _wanted(coming.wait(), ctx.route)
        return dpartial_RH, None, None, None


def _wanted(rows: Rows, route: Any) -> torch.Tensor:
    """(R, H): the rows, out of the transport's buffer, zero where nobody wants one."""
    rows_RH = rows.contiguous(route.num_rows)
    return rows_RH if route.wanted_R1 is None else rows_RH.masked_fill(~route.wanted_R1, 0.0)
