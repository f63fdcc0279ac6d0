"""Exact balance: in each ride, spare slots of ranks with few tokens hold replicas of experts that have many.

    forward    load of experts -> all ranks   plan   dispatch x   experts              combine
                                                     fetch replicas
    backward                                         dispatch dy  experts' backward    combine dx
                                                     fetch replicas                      gradients of replicas go home

The plan is made from the routing at hand (`carpool.replicas.slot_plan`), by every rank alike, and belongs to this ride:
one layer, one micro-batch. Replicas are fetched while tokens travel and experts at home compute, which use their
parameters where these are (`carpool.experts.slot_ranges`); then replicas compute. They are freed after that, and
fetched again in the backward, unless they are saved for it. The gradients of a replica are sent to its home, and added
there in order of ranks, each time to the same bits. Nothing else changes: the routing, its losses and weights are those
of homes, and homes alone have parameters, optimizer state and entries in checkpoints.

`BalancedOrder` is an order around another one, so every schedule, policy of activations and way to run a ride (plain,
compiled, in chunks, recomputed) has it. Pieces of a ride share one plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from carpool.experts import ExpertWeights
from carpool.experts.slot_ranges import RangeGradients, SlotRanges, travelling
from carpool.layout import ExpertLayout
from carpool.metrics.counters import in_recompute, new_counter
from carpool.plugins import unknown
from carpool.replicas.slot_links import SlotLinks
from carpool.replicas.slot_plan import Costs, SlotPlan, add_counts, count_choices, served_by
from carpool.replicas.slot_planners import SLOT_PLANNERS, SlotPlanner
from carpool.ride.setup import Order, RideSetup, SavedActivations
from carpool.transport import Fetched, Pending


class Load(NamedTuple):
    """The largest load of a rank in a layer's rides, over the mean of all ranks; without and with spare slots.

    Attributes:
        before, after: that of homes alone, and with replicas; 1.0: balanced. Each ride counts by its choices.
        replicas: experts fetched into spare slots of all ranks, in a ride, on average.
        beyond: rides in which the largest load of a rank is beyond the limit.
    """

    rides: int
    before: float
    after: float
    replicas: float
    beyond: int = 0

    @classmethod
    def of(cls, counts: Sequence[float], num_ranks: int) -> Load:
        """From `SpareSlots.counts`, or the sum of those of several ranks."""
        rides, choices, before, after, replicas, beyond = counts
        mean = choices / num_ranks
        loads = (before / mean, after / mean) if choices else (1.0, 1.0)
        return cls(int(rides), *loads, replicas / max(1, rides), int(beyond))


@dataclass(frozen=True)
class SpareSlotOptions:
    """Spare slots of a layer.

    Attributes:
        number: of each rank.
        limit: the load of a rank, over the mean, that plans do not exceed where slots suffice, whatever fetching costs.
            None: there is no limit, only time counts.
        plan: what the plan follows (a key of `carpool.replicas.slot_planners.SLOT_PLANNERS`).
        saved: fetched parameters are saved for the backward instead of fetched again.
        costs: what plans weigh. None: what the machine's rates say.
        options: of the planner (`SlotPlanner.options`).

    Raises:
        ValueError: a number, a limit or options that make no sense.
    """

    number: int
    limit: float | None = 1.1
    plan: str = "balance"
    saved: bool = False
    costs: Costs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"{self.number} spare slots of a rank must be at least 1; leave them out for none")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} is a load over the mean, which is 1 at least")
        if self.plan not in SLOT_PLANNERS:
            raise ValueError(unknown(SLOT_PLANNERS, self.plan))
        self.planner()

    def planner(self) -> SlotPlanner:
        """A planner for one layer."""
        kind = SLOT_PLANNERS[self.plan]
        if more := sorted(set(self.options) - set(kind.options)):
            raise ValueError(f"slot planner {self.plan!r} has no option {more[0]!r}")
        return kind(**self.options)

    @classmethod
    def of(cls, asked: int | SpareSlotOptions) -> SpareSlotOptions | None:
        """Options from a number of slots; None of 0."""
        return cls(asked) if isinstance(asked, int) and asked else asked or None  # type: ignore[return-value]


def check_spare_slots(layout: ExpertLayout) -> None:
    """Raise ValueError if a layer of this layout cannot have spare slots."""
    if layout.slices > 1:
        raise ValueError(
            f"spare slots hold whole experts, and this layout cuts each into {layout.slices} slices: leave out one of "
            "the two"
        )


class SpareSlots:
    """The spare slots of one layer: its plans, their transfers, and what is counted.

    Args:
        rank: this one, in the expert-parallel group.
        options: how many, and the limit.
        links: the way of replicas.
        price: what plans weigh, of a layer with these weights; asked once, if the options do not say.
        node_W: the node of each rank.

    Attributes:
        homes, per_rank: slots of each rank without spare ones, and with them.
        counts: (7,) int64 since `reset`, the same on all ranks but for the last: rides, choices, the largest load
            in each ride without and with spare slots, replicas, rides beyond the limit, and choices that this
            rank has computed. None before the first ride.
        bytes_sent: bytes of parameters and gradients sent to other ranks since `reset`: by this rank, or, where the
            device counts them, by all ranks, on the first one alone.

    Raises:
        ValueError: the layout has slices.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        rank: int,
        options: SpareSlotOptions,
        links: SlotLinks,
        price: Callable[[ExpertWeights], Costs],
        node_W: torch.Tensor,
    ) -> None:
        check_spare_slots(layout)
        self.layout, self.links, self.number, self.saved = layout, links, options.number, options.saved
        self.rank, self.homes = rank, layout.slots_per_rank
        self.per_rank = self.homes + self.number
        self.counts: torch.Tensor | None = None
        self.bytes_sent: int | torch.Tensor = 0
        self._costs, self._price, self._limit = options.costs, price, options.limit
        self._home_E = torch.tensor([rank for rank, _ in layout.home_of])
        self._expert_P, self._node_W = layout.expert_WS.flatten(), node_W
        # Each slot is named as its expert is.
        self._in_order = self._expert_P.tolist() == list(range(len(self._home_E)))
        slots = [*layout.home_of]
        slots += [(rank, self.homes + place) for rank in range(layout.num_ranks) for place in range(self.number)]
        self._names_N = torch.tensor([rank * self.per_rank + place for rank, place in slots], dtype=torch.int32)
        self.planner = options.planner()
        self._on_device: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def costs(self, weights: ExpertWeights) -> Costs:
        """What plans weigh."""
        if self._costs is None:
            limit = 0 if self._limit is None else round(1000 * self._limit)
            self._costs = replace(self._price(weights), limit=limit)
        return self._costs

    def assign(self, slot_TK: torch.Tensor, costs: Costs) -> tuple[torch.Tensor, SlotPlan]:
        """From the slots that are homes, (T, K), those with spare ones, as transports name them; and the plan.
        Collective."""
        home_E, expert_P, node_W, names_N = self._tables(slot_TK.device)
        expert_TK = slot_TK
        if not self._in_order:
            expert_TK = torch.where(slot_TK < 0, -1, expert_P[slot_TK.clamp(min=0).long()])
        load_WE = self.links.gather_loads(count_choices(expert_TK, len(home_E)))
        plan = self.planner.plan(load_WE, home_E, self.number, costs, node_W)
        self._count(load_WE, home_E, plan)
        return served_by(expert_TK, load_WE, home_E, plan, self.rank, names_N), plan

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if device not in self._on_device:
            tables = self._home_E, self._expert_P, self._node_W, self._names_N
            self._on_device[device] = tuple(one.to(device) for one in tables)
        return self._on_device[device]

    def _count(self, load_WE: torch.Tensor, home_E: torch.Tensor, plan: SlotPlan) -> None:
        if in_recompute():
            return
        if self.counts is None:
            self.counts = new_counter((7,), torch.int64, load_WE.device)
        limit = 0 if self._limit is None else round(1000 * self._limit)
        add_counts(self.counts, load_WE, home_E, plan, self.rank, limit)

    def count_bytes(self, experts: int | torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Count that so many experts were sent, whose tensors are like those of `rows`, which have a row for each."""
        size = sum(one.element_size() * math.prod(one.shape[1:]) for one in rows)
        if isinstance(experts, torch.Tensor) and not isinstance(self.bytes_sent, torch.Tensor):
            self.bytes_sent = new_counter((), torch.int64, experts.device)
        self.bytes_sent += experts * size

    def load(self) -> Load:
        """What was counted since `reset`. Waits for the device."""
        return Load.of([0] * 6 if self.counts is None else self.counts[:6].tolist(), self.layout.num_ranks)

    def reset(self) -> None:
        """Set the counters to zero."""
        if self.counts is not None:
            self.counts.zero_()
        if isinstance(self.bytes_sent, torch.Tensor):
            self.bytes_sent.zero_()
        else:
            self.bytes_sent = 0


class _Ridden(NamedTuple):
    """What the backward needs beside the activations of the order inside: the route of its first piece, the plan's
    handle, and the fetched parameters if they are saved."""

    route: Any
    handle: Any
    fetched: tuple[torch.Tensor, ...] | None


class _Slots(NamedTuple):
    """The weights of slots. `release` is called when the experts that read them have been launched."""

    weights: SlotRanges
    coming: Fetched

    def release(self) -> None:
        self.weights.release()
        self.coming.release()


class _Started(NamedTuple):
    """The state of the order inside, the plan's handle, and the weights of slots, some of which are on their way."""

    inner: Any
    handle: Any
    slots: _Slots


class BalancedOrder:
    """An `Order` around another one, whose rides have spare slots; see the module's docstring."""

    def __init__(self, inner: Order, spare: SpareSlots) -> None:
        self.inner, self.spare, self.links = inner, spare, spare.links

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> _Started:
        slot_TK, plan = self.spare.assign(slot_TK, self.spare.costs(weights))
        handle = self.links.take(plan)
        # Where the host has to read the plan, it does so while the tokens travel.
        early = None if self.links.waits_for_host else self._fetch(weights, handle)
        inner = self.inner.start(x_TH, weight_TK, slot_TK, weights, setup)
        return _Started(inner, handle, early or self._fetch(weights, handle))

    def forward(
        self, started: _Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        y_TH, activations = self.inner.forward(started.inner, self._weights(started.slots), setup, backward)
        if activations is not None:
            first, fetched = activations[0], None
            if self.spare.saved:
                fetched = tuple(rows.clone() for rows in travelling(started.slots.weights.spare).values())
            ridden = _Ridden(first.route, started.handle, fetched)
            activations = first._replace(route=ridden), *activations[1:]
        started.slots.release()
        return y_TH, activations

    def backward(
        self,
        dy_TH: torch.Tensor,
        weights: ExpertWeights,
        activations: tuple[SavedActivations, ...],
        setup: RideSetup,
        needs_dweights: bool,
    ) -> tuple[Pending, ExpertWeights | Callable[[], ExpertWeights] | None]:
        first = activations[0]
        route, handle, fetched = first.route
        activations = first._replace(route=route), *activations[1:]
        slots = self._fetch(weights, handle, fetched)
        del fetched
        coming, dslots = self.inner.backward(dy_TH, self._weights(slots), activations, setup, needs_dweights)
        # Gradients of weights that are computed later read none.
        slots.release()
        ranges = slots.weights

        def homes(dslots: ExpertWeights | RangeGradients) -> ExpertWeights:
            dhomes, dspare = ranges.apart(dslots)
            given = [i for i, rows in enumerate(dspare) if rows is not None]
            of_homes, of_spare = ([rows for rows in one if rows is not None] for one in (dhomes, dspare))
            self.spare.count_bytes(self.links.sent(handle)[1], of_spare)
            found = dict(zip(given, self.links.send_home(of_homes, of_spare, handle), strict=True))
            return ExpertWeights._make(found.get(i) for i in range(len(dhomes)))

        if dslots is None:
            return coming, None
        if callable(dslots):
            return coming, lambda: homes(dslots())
        # While the tokens' gradients travel.
        return coming, homes(dslots)

    def _fetch(self, weights: ExpertWeights, handle: Any, fetched: tuple[torch.Tensor, ...] | None = None) -> _Slots:
        homes = list(travelling(weights).values())
        if fetched is None:
            coming = self.links.fetch(homes, handle)
            self.spare.count_bytes(self.links.sent(handle)[0], homes)
        else:
            coming = Fetched(lambda: list(fetched))
        return _Slots(SlotRanges(weights, self.spare.homes, self.spare.number, coming.wait), coming)

    def _weights(self, slots: _Slots) -> Any:
        """Weights as the order inside takes them: spare slots are waited for when experts need them, if it can."""
        return slots.weights if getattr(self.inner, "takes_ranges", False) else slots.weights.stacked()
