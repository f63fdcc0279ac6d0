"""The components of a layer's rides, as one immutable value; the contract of an order, and its saved activations.

    setup = RideSetup(transport, experts, LayerStats(num_experts, num_ranks, rank))
    y_TH, _ = ride(x_TH, routing, slot_TK, weights, setup)
    setup = replace(setup, hooks=hooks)        a new value; rides in flight use the old one

A layer constructs it once: the operator in a compiled graph finds it by its number (`Numbered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from carpool.activations import SAVE_ALL, ActivationPolicies, HiddenStates, Offloader
from carpool.experts import Experts, ExpertWeights
from carpool.kernels.numbered import Numbered
from carpool.metrics.counters import LayerStats
from carpool.transport import Pending, Transport


class SavedActivations(NamedTuple):
    """The saved activations of a ride, or of one chunk of it.

    Attributes:
        route: of the forward.
        x: the tokens that arrived, or those before the dispatch if they will be sent again.
        saved: the experts' saved activations: tensors, None, and pre-activations as `HiddenStates`.
    """

    route: Any
    x: HiddenStates
    saved: tuple[Any, ...]


class Order(Protocol):
    """The order of a ride's verbs, and the activations that it saves. Runs without autograd.

        started = order.start(x, weight, slot, weights, setup)                   plan, first dispatches
        y, activations = order.forward(started, weights, setup, backward)        experts, combine
        coming, dweights = order.backward(dy, weights, activations, setup, ...)  the reverse; `coming.wait()` ends it

    An order never changes what is computed. `carpool.ride.chunks` has the order without a schedule;
    `carpool.ride.schedule` has others.
    """

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> Any:
        """Plan the ride and launch the first dispatches. Returns the state for `forward`.

        Raises:
            ValueError: this order cannot be used with these experts or weights. Nothing has been launched then."""
        ...

    def forward(
        self, started: Any, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        """(y_TH, saved activations). `backward`: whether one will follow; if not, nothing is saved."""
        ...

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        activations: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        """(the last combines, whose `wait()` gives dx_TH and dweight_TK; gradients of the weights if needed, or, with
        `setup.deferred`, what computes them)."""
        ...


class RideHooks:
    """Callbacks in the backward of every ride whose `RideSetup` has them. The defaults do nothing; a scheduler
    overrides those that it needs (`carpool.ride.priority`)."""

    def before_experts(self) -> None:
        """Called when the last gradients have arrived, before the experts compute."""


NO_HOOKS = RideHooks()


Tensors = Sequence[torch.Tensor | None]


class _Item(NamedTuple):
    weights: Tensors
    compute: Callable[[], Tensors]


class DeferredGradients:
    """Deferred weight gradients (`carpool.ride.split_backward`).

        backward                   computes gradients of tokens and routing weights; defers those of weights
        weights = deferred.take()  the deferred gradients of this backward
        weights()                  computes them, and accumulates them into parameters as autograd does, hooks included

    A node that defers has detached weights (after casts, slots and shards), so that the backward stops at them.
    `weights()` continues it from there to the parameters.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def put(self, weights: Tensors, compute: Callable[[], Tensors]) -> None:
        """Defer gradients, in a backward. `compute` returns the gradient of each of `weights`, or None."""
        self._items.append(_Item(weights, compute))

    def take(self) -> Callable[[], None]:
        """A function that computes all gradients deferred since the last call. To be called once."""
        items, self._items = self._items, []

        def compute() -> None:
            # In the order of the backward. Each is freed when it is done.
            items.reverse()
            while items:
                weights, gradients = items.pop()
                with torch.no_grad():
                    found = gradients()
                pairs = zip(weights, found, strict=True)
                given = [(w, g) for w, g in pairs if w is not None and g is not None and w.requires_grad]
                if given:
                    torch.autograd.backward([w for w, _ in given], [g for _, g in given])

        return compute


@dataclass(frozen=True, eq=False)
class RideSetup(Numbered):
    """See the module's docstring.

    Attributes:
        experts: the expert computation; None for `ride_module`, which gets a module instead.
        stats: counters of the layer.
        order: of the verbs (`Schedule.order` makes one). None: the plain one.
        hooks: callbacks of the backward.
        offloader: for policies that are "offload".
        deferred: collects weight gradients for later. None: the backward computes them.
    """

    transport: Transport
    experts: Experts | None
    stats: LayerStats
    order: Order | None = None
    hooks: RideHooks = NO_HOOKS
    policies: ActivationPolicies = SAVE_ALL
    offloader: Offloader | None = None
    deferred: DeferredGradients | None = None
