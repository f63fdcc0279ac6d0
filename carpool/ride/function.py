"""The ride of a batch of tokens as one node of autograd, and as one operator of `torch.compile`.

The node's inputs are the tokens, the routing weights and the expert weights, and its output is the MoE output. An
`Order` implements its forward and backward: `chunks.py`, or one of `carpool.ride.schedule`.

With independent work that overlaps the ride (`overlapped`, such as shared experts) there are two nodes, and autograd
runs that work's backward between them:

    forward    start: plan, launch dispatch | overlapped | dispatch arrives, experts, combine
    backward   dispatch dy, experts' backward, launch combine | overlapped's backward | combine arrives

For `torch.compile` the ride is an operator with this forward and backward: `carpool.ride.operator`. A checkpointed
layer may be recomputed without its rides: `carpool.activations.whole_layers`. `ride_module.py` is for expert modules
without kernels of ours.

Gradients of gradients are refused: the nodes' backwards build no graph, so second-order terms would be missing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from carpool.activations.whole_layers import checkpointed, taken_before
from carpool.experts import ExpertWeights
from carpool.experts.base import NUM_BASE
from carpool.metrics.counters import in_recompute
from carpool.ride.chunks import PLAIN, bring_back, offload_saved, save, saved
from carpool.ride.operator import ride_operator
from carpool.ride.setup import RideSetup, SavedActivations
from carpool.routing import Routing
from carpool.transport import Pending

Result = TypeVar("Result")


def ride(
    x_TH: torch.Tensor,
    routing: Routing,
    slot_TK: torch.Tensor,
    weights: ExpertWeights,
    setup: RideSetup,
    overlapped: Callable[[], Result] | None = None,
) -> tuple[torch.Tensor, Result | None]:
    """Dispatch tokens to their slots, compute the experts, and combine their outputs.

    Args:
        x_TH: (T, H) tokens; they are sent in the dtype of the weights (under autocast, in autocast's). T may differ
            between ranks, and be 0.
        routing: with weights.
        slot_TK: (T, K) int32 global slot ids, -1: none (from `assign`, so K times as many as slices of an expert).
        weights: of this rank's slots.
        setup: transport, experts, counters, order and hooks.
        overlapped: independent work, which is called after the first dispatch was launched. Under `torch.compile` it is
            called before the ride, and the compiler orders it.

    Returns:
        y_TH: (T, H), in the dtype that was sent. Differentiable in x, the routing's weights and those of the slots.
        The result of `overlapped`; None without it.

    Raises:
        ValueError: the order cannot be used with these experts or weights.
        RuntimeError: in a backward with create_graph=True.
    """
    if not getattr(setup.experts, "computes_adapters", False) and (weights.adapted or weights.quantised):
        what = "adapters of experts" if weights.adapted else "a quantised base"
        raise ValueError(f"experts={getattr(setup.experts, 'name', None)!r} cannot compute {what}: use 'grouped'")
    if setup.deferred is not None and torch.compiler.is_compiling():
        # An operator defers no gradients.
        return _uncompiled(x_TH, routing, slot_TK, weights, setup, overlapped)
    expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
    assert weight_TK is not None
    slices = slot_TK.shape[1] // max(1, expert_TK.shape[1])
    if not torch.compiler.is_compiling():
        setup.stats.count(expert_TK, weight_TK)
    if slices > 1:
        weight_TK = routing.of_slices(slices).weight_TK
        assert weight_TK is not None
    device = x_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.up_SFH.dtype
    compiling, trip, result = torch.compiler.is_compiling(), None, None
    # Autocast is disabled: it would change dtypes in the forward and not in the backward.
    deferred: ExpertWeights | None = None
    with torch.autocast(device, enabled=False):
        x_TH = x_TH.to(dtype)
        weights = weights.to(dtype)
        if setup.deferred is not None and not compiling and (x_TH.requires_grad or weight_TK.requires_grad):
            deferred, weights = weights, ExpertWeights._make(None if w is None else w.detach() for w in weights)
        if overlapped is not None and not compiling and not taken_before():
            trip = _Trip()
            x_TH, weight_TK = _Start.apply(x_TH, weight_TK, slot_TK, weights, trip, setup)
            trip.apart = x_TH.requires_grad or weight_TK.requires_grad
    if overlapped is not None:
        result = overlapped()
    with torch.autocast(device, enabled=False):
        backward = torch.is_grad_enabled() and (
            x_TH.requires_grad or weight_TK.requires_grad or any(w is not None and w.requires_grad for w in weights)
        )
        if compiling:
            return ride_operator(x_TH, weight_TK, slot_TK, *weights, expert_TK, setup.number, backward)[0], result
        later: tuple[list[Callable[[], None]], ...] = ()
        if setup.transport.combines_in_place and backward and setup.order in (None, PLAIN) and in_recompute():
            later = ([],) if getattr(setup.experts, "can_defer", False) else ()
        y_TH = _Ride.apply(x_TH, weight_TK, slot_TK, backward, setup, trip, later, deferred, *weights)
        # Checkpointing ends the recomputation inside of `apply` if this ride is the last to save anything. Its outputs
        # are then read by nobody, and not computed.
        with torch.no_grad():
            for finish in chain(*later):
                finish()
        return y_TH, result


_uncompiled: Any = torch.compiler.disable(ride)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a node's backward that builds no graph.

    (`once_differentiable` refuses only if an incoming gradient requires a gradient itself. With a linear loss none
    does, and second-order terms through the weights would be missing silently.)"""

    def checked(ctx: Any, *gradients: Any) -> Any:
        # In a backward grad mode is enabled exactly if it was called with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a MoE layer of Carpool has no gradients of gradients: call backward or autograd.grad without "
                "create_graph=True, or compute the second order by differences"
            )
        ctx.has_run = True
        return backward(ctx, *gradients)

    return checked


class WaitingRides:
    """The rides whose graph is alive, and whose backward has not begun."""

    def __init__(self) -> None:
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, y_TH: torch.Tensor) -> None:
        """Add a ride by its output y_TH."""
        if y_TH.requires_grad and not torch.compiler.is_compiling() and not in_recompute():
            self._nodes.add(y_TH.grad_fn)

    def count(self) -> int:
        """The number of these rides."""
        if self._count():
            gc.collect()  # an unreachable graph may be in a reference cycle
        return self._count()

    def _count(self) -> int:
        return sum(not getattr(node, "has_run", False) for node in self._nodes)


class _Trip:
    """State shared by the two nodes of a ride that overlaps other work.

    Attributes:
        started: the result of `order.start`, until the second node takes it.
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
        # The second node returns None for gradients that are still in flight.
        ctx.set_materialize_grads(False)
        ctx.trip = trip
        trip.started = (setup.order or PLAIN).start(x_TH, weight_TK, slot_TK, weights, setup)
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
        later: tuple[list[Callable[[], None]], ...],
        deferred: ExpertWeights | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = ExpertWeights._make(tensors)

        # Not `any(ctx.needs_input_grad)`, which may be True under no_grad, too.
        region = checkpointed.get() if backward else None
        later = later if region is None else ()

        def take() -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
            if trip is None:
                started = (setup.order or PLAIN).start(x_TH, weight_TK, slot_TK, weights, setup)
            else:
                started, trip.started = trip.started, None
            y_TH, activations = (setup.order or PLAIN).forward(started, weights, setup, backward, *later)
            return y_TH, None if activations is None else offload_saved(activations, setup)

        y_TH, activations = take() if region is None else region.ride(take)
        if activations is not None:
            save(ctx, weights, activations, setup)
            ctx.trip, ctx.deferred = trip, deferred
        return y_TH

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
        setup: RideSetup = ctx.setup
        weights, activations = saved(ctx)
        activations = bring_back(activations, setup)
        deferred: ExpertWeights | None = ctx.deferred
        needs_dweights = any(ctx.needs_input_grad[_WEIGHTS : _WEIGHTS + NUM_BASE])
        if deferred is not None:
            needs_dweights = any(w is not None and w.requires_grad for w in deferred[:NUM_BASE])
        coming, dweights = (setup.order or PLAIN).backward(dy_TH, weights, activations, setup, needs_dweights)
        if deferred is not None and dweights is not None:
            assert setup.deferred is not None
            setup.deferred.put(deferred, dweights if callable(dweights) else partial(_same, dweights))
            dweights = None
        dx_TH = dweight_TK = None
        if ctx.trip is not None and ctx.trip.apart and _reaches(ctx.next_functions[:2]):
            ctx.trip.coming = coming
        else:
            dx_TH, dweight_TK = coming.wait()
        assert not callable(dweights)
        return dx_TH, dweight_TK, *(None,) * (_WEIGHTS - 2), *(dweights or (None,) * len(weights))


# Index of the first weight among the arguments of `_Ride`.
_WEIGHTS = 8


def _same(dweights: ExpertWeights) -> ExpertWeights:
    return dweights


def _reaches(functions: Any) -> bool:
    """Whether this backward will run one of these nodes; `torch.autograd.grad` for weights alone does not."""
    return any(torch._C._will_engine_execute_node(node) for node, _ in functions if node is not None)
