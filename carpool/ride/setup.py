"""What the rides of a layer are made of, as one value; the contract of an order, and what it keeps.

    setup = RideSetup(transport, experts, LayerStats(num_experts, num_ranks, rank))
    y_TH, _ = ride(x_TH, routing, slot_TK, weights, setup)
    setup = replace(setup, hooks=hooks)        a change makes another value; rides under way keep the old one

A layer makes it once and keeps it: an operator in a compiled graph finds it by its number (`Numbered`).
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
    """What the forward of a ride, or of one chunk of it, keeps for its backward besides the parameters.

    Attributes:
        route: as planned.
        x: the rows that arrived; the rows that were sent, if they will be sent again.
        saved: what the experts keep: tensors, `HiddenStates` and Nones. The `HiddenStates` are pre-activations.
    """

    route: Any
    x: HiddenStates
    saved: tuple[Any, ...]


class Order(Protocol):
    """In which order a ride asks for its verbs, and what it keeps for the backward. Runs without autograd.

        started   = order.start(x, weight, slot, weights, setup)          plan; ask for what can leave at once
        y, kept   = order.forward(started, weights, setup, backward)      experts, combine
        coming, dweights = order.backward(dy, weights, kept, setup, ...)  the same in reverse; `coming.wait()` ends it

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
        """Plan the ride and launch the first dispatches. Returns what `forward` continues with.

        Raises:
            ValueError: this order cannot be used with these experts or weights. Nothing has been launched then."""
        ...

    def forward(
        self, started: Any, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        """(y_TH, what is kept). `backward`: whether one will follow; if not, nothing is kept."""
        ...

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        kept: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        """(the last combines, whose `wait()` gives dx_TH and dweight_TK; gradients of the weights if needed, or, with
        `setup.deferred`, what computes them)."""
        ...


class RideHooks:
    """Called by the backward of every ride whose `RideSetup` holds it. This one does nothing; a scheduler overrides
    what it needs (`carpool.ride.priority`)."""

    def before_experts(self) -> None:
        """The last gradients have arrived, and the experts compute next."""


NO_HOOKS = RideHooks()


Tensors = Sequence[torch.Tensor | None]


class _Item(NamedTuple):
    weights: Tensors
    compute: Callable[[], Tensors]


class DeferredGradients:
    """Weight gradients as work of their own (`carpool.ride.split_backward`).

        backward               gradients of rows, routing weights, hidden states; those of weights are put here
        weights = deferred.take()  what this backward has put
        weights()              computes it, and gives it to the parameters as autograd would: hooks are called

    A node that puts something here has the weights as they are after casts, slots and shards, and no edge to them: the
    edge is walked by `weights()`.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def put(self, weights: Tensors, compute: Callable[[], Tensors]) -> None:
        """In a backward. `compute` returns the gradient of each of `weights`, or None; it holds what it needs."""
        self._items.append(_Item(weights, compute))

    def take(self) -> Callable[[], None]:
        """What computes all that has been put since the last call, once."""
        items, self._items = self._items, []

        def compute() -> None:
            # From the front, as the backward did, and each let go when it is done.
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
        transport: how rows travel.
        experts: what is computed on them; None for `ride_module`, which is given a module instead.
        stats: where the layer counts.
        order: when each verb runs (`Schedule.order` makes one). None: the plain one.
        hooks: told where the backward is.
        policies: of what rides keep.
        offloader: where it goes, if a policy is "offload".
        deferred: gets the weights' gradients, to be computed later. None: they come with the backward.
    """

    transport: Transport
    experts: Experts | None
    stats: LayerStats
    order: Order | None = None
    hooks: RideHooks = NO_HOOKS
    policies: ActivationPolicies = SAVE_ALL
    offloader: Offloader | None = None
    deferred: DeferredGradients | None = None
