"""Exact balance: in each ride, spare slots of ranks with few tokens hold replicas of experts that have many.

    forward    load of experts -> all ranks   plan   dispatch x   experts              combine
                                                     fetch replicas
    backward                                         dispatch dy  experts' backward    combine dx
                                                     fetch replicas                      gradients of replicas go home

The plan is made from the routing at hand (`carpool.replicas.slot_plan`), by every rank alike, and belongs to this ride:
one layer, one micro-batch. Replicas are fetched while tokens travel, let go of after the experts have computed, and
fetched again in the backward, so no layer keeps any. The gradients of a replica are sent to its home, and added there
in order of ranks, each time to the same bits. Nothing else changes: the routing, its losses and weights are those of
homes, and homes alone have parameters, optimizer state and entries in checkpoints.

`BalancedOrder` is an order around another one, so every schedule, policy of activations and way to run a ride (plain,
compiled, in chunks, recomputed) has it. Pieces of a ride share one plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from carpool.experts import ExpertWeights
from carpool.experts.base import stand_in
from carpool.layout import ExpertLayout
from carpool.metrics.counters import Meter, in_recompute, new_counter
from carpool.metrics.host import ToHost
from carpool.replicas.node_slots import make_filler
from carpool.replicas.slot_plan import Costs, SlotPlan, plan_slots, served_by
from carpool.replicas.slots import SlotFiller, Transfer
from carpool.ride.setup import Order, RideSetup, SavedActivations
from carpool.transport import Pending

# Plans whose lists of sends and receives are kept: routing changes slowly, and micro-batches repeat plans.
KEPT_PLANS = 64


class Load(NamedTuple):
    """The largest load of a rank in a layer's rides, over the mean of all ranks; without and with spare slots.

    Attributes:
        rides: number of them.
        before, after: that of homes alone, and with replicas; 1.0: balanced. Each ride counts by its choices.
        replicas: experts fetched into spare slots of all ranks, in a ride, on average.
    """

    rides: int
    before: float
    after: float
    replicas: float


@dataclass(frozen=True)
class SpareSlotOptions:
    """Spare slots of a layer.

    Attributes:
        number: of each rank.
        limit: the load of a rank, over the mean, that plans do not exceed where slots suffice, whatever fetching costs.
            None: there is no limit, only time counts.
        inside_nodes: experts are replicated only on ranks of their home's node.
        costs: what plans weigh. None: what the machine's rates say.

    Raises:
        ValueError: a number or a limit that makes no sense.
    """

    number: int
    limit: float | None = 1.1
    inside_nodes: bool = False
    costs: Costs | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"{self.number} spare slots of a rank must be at least 1; leave them out for none")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} is a load over the mean, which is 1 at least")

    @classmethod
    def of(cls, asked: int | SpareSlotOptions) -> SpareSlotOptions | None:
        """Options from a number of slots; None of 0."""
        return cls(asked) if isinstance(asked, int) and asked else asked or None  # type: ignore[return-value]


def check_spare_slots(layout: ExpertLayout) -> None:
    """Raise ValueError if a layer of this layout cannot have spare slots."""
    if not layout.slot_is_home or layout.slices > 1:
        raise ValueError(
            f"spare slots are filled for each micro-batch beside experts that are computed where their parameters are, "
            f"and this layout is {layout.kind}: leave out its replicas (or slices), or the spare slots"
        )


class SpareSlots:
    """The spare slots of one layer: its plans, their transfers, and what is counted.

    Args:
        layout: of the layer, whose slots are its homes.
        group: the expert-parallel process group, of several ranks.
        options: how many, and the limit.
        price: what plans weigh, of a layer with these weights; asked once, if the options do not say.
        node_W: the node of each rank, if replicas stay inside nodes; None: they may go anywhere.
        meter: of the layer.

    Raises:
        ValueError: the layout has replicas or slices, whose slots are no homes.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        group: dist.ProcessGroup,
        options: SpareSlotOptions,
        price: Callable[[ExpertWeights], Costs],
        node_W: torch.Tensor | None = None,
        meter: Meter | None = None,
    ) -> None:
        check_spare_slots(layout)
        self.layout, self.group, self.number, self.meter = layout, group, options.number, meter
        self.rank, self.per_rank = dist.get_rank(group), layout.slots_per_rank + options.number
        self.counts: torch.Tensor | None = None
        self._costs, self._price, self._limit = options.costs, price, options.limit
        self._home_E = torch.tensor([rank for rank, _ in layout.home_of])
        self._expert_P, self._node_W = layout.expert_WS.flatten(), node_W
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._filler = lru_cache(KEPT_PLANS)(self._make_filler)

    def costs(self, weights: ExpertWeights) -> Costs:
        """What plans weigh."""
        if self._costs is None:
            limit = 0 if self._limit is None else round(1000 * self._limit)
            self._costs = self._price(weights)._replace(limit=limit)
        return self._costs

    def assign(self, slot_TK: torch.Tensor, costs: Costs) -> tuple[torch.Tensor, SlotPlan]:
        """From the slots that are homes, (T, K), those with spare ones, as transports name them; and the plan.
        Collective."""
        home_E, expert_P, node_W = self._tables(slot_TK.device)
        homes = self.layout.slots_per_rank
        expert_TK = torch.where(slot_TK < 0, -1, expert_P[slot_TK.clamp(min=0).long()])
        load_E = torch.zeros(len(home_E) + 1, dtype=torch.int32, device=slot_TK.device)
        index_N = torch.where(expert_TK < 0, len(home_E), expert_TK).flatten().long()
        load_E = load_E.scatter_add_(0, index_N, torch.ones_like(index_N, dtype=torch.int32))[:-1]
        load_WE = load_E.new_empty(self.layout.num_ranks, len(home_E))
        dist.all_gather_into_tensor(load_WE.view(-1), load_E.contiguous(), group=self.group)
        plan = plan_slots(load_WE, home_E, self.number, costs, node_W)
        spare_TK = served_by(expert_TK, load_WE, home_E, plan, self.rank)
        home_TK = slot_TK + slot_TK.div(homes, rounding_mode="floor") * self.number
        rank_TK, place_TK = spare_TK // self.number, spare_TK % self.number
        replica_TK = rank_TK * self.per_rank + homes + place_TK
        self._count(load_WE, home_E, plan)
        return torch.where(slot_TK < 0, -1, torch.where(spare_TK < 0, home_TK, replica_TK)).int(), plan

    def filler(self, expert_WS: torch.Tensor) -> SlotFiller:
        """What fetches the experts of a plan, which is on the host, and sends their gradients home."""
        return self._filler(tuple(map(tuple, expert_WS.tolist())))

    def _make_filler(self, replicas: tuple[tuple[int, ...], ...]) -> SlotFiller:
        most = self.layout.slots_per_rank
        slots = [
            (*homes, *(-1,) * (most - len(homes)), *more)
            for homes, more in zip(self.layout.homes, replicas, strict=True)
        ]
        return make_filler(ExpertLayout(self.layout.homes, tuple(slots)), self.group, self.meter)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if device not in self._on_device:
            node_W = None if self._node_W is None else self._node_W.to(device)
            self._on_device[device] = self._home_E.to(device), self._expert_P.to(device), node_W
        return self._on_device[device]

    def _count(self, load_WE: torch.Tensor, home_E: torch.Tensor, plan: SlotPlan) -> None:
        if in_recompute():
            return
        if self.counts is None:
            self.counts = new_counter((5,), torch.int64, load_WE.device)
        load_E = load_WE.sum(0)
        before_W = torch.zeros_like(plan.load_W).scatter_add(0, home_E, load_E)
        replicas = (plan.expert_WS >= 0).sum()
        self.counts += torch.stack([replicas.new_ones(()), load_E.sum(), before_W.max(), plan.load_W.max(), replicas])

    def load(self) -> Load:
        """What was counted since `reset`. Waits for the device."""
        rides, total, before, after, replicas = [0] * 5 if self.counts is None else self.counts.tolist()
        mean = max(1, total) / self.layout.num_ranks
        return Load(rides, before / mean if total else 1.0, after / mean if total else 1.0, replicas / max(1, rides))

    def reset(self) -> None:
        """Set the counters to zero."""
        if self.counts is not None:
            self.counts.zero_()


class _Ridden(NamedTuple):
    """The route of a ride's first piece, and the filler of the ride."""

    route: Any
    filler: SlotFiller


class _Fetch:
    """Replicas on their way to spare slots. Calling it gives the weights of all slots; the first call waits."""

    def __init__(self, homes: ExpertWeights, filler: SlotFiller) -> None:
        self._homes, self._filler = homes, filler
        self._slots: ExpertWeights | None = None
        # Stand-ins of quantised matrices have no memory: their codes and scales travel.
        self._skip = 2 if homes.quantised else 0
        first = filler.hops[0]
        self._coming = [first.send_rows(w, w.dtype) for w in homes[self._skip :] if w is not None]

    def __call__(self) -> ExpertWeights:
        if self._slots is None:
            coming = iter(self._coming)
            found: list[torch.Tensor | None] = []
            for place, home in enumerate(self._homes):
                if home is None:
                    found.append(None)
                elif place < self._skip:
                    shape = self._filler.num_slots, *home.shape[1:]
                    found.append(stand_in(shape, home.dtype, home.device))
                else:
                    found.append(self._arrive(home, next(coming)))
            self._slots, self._coming = ExpertWeights._make(found), []
        return self._slots

    def _arrive(self, home: torch.Tensor, coming: Transfer) -> torch.Tensor:
        first, *further = self._filler.hops
        rows = first.slots(home, first.wait(coming, ahead=True))
        for hop in further:
            rows = hop.slots(rows, hop.wait(hop.send_rows(rows, rows.dtype), ahead=False))
        return rows


def _send_home(dslots: ExpertWeights, filler: SlotFiller) -> ExpertWeights:
    """The gradients of homes from those of slots."""
    found: list[torch.Tensor | None] = list(dslots)
    for hop in reversed(filler.hops):
        coming = [None if rows is None else hop.send_gradients(rows) for rows in found]
        for place, (rows, transfer) in enumerate(zip(found, coming, strict=True)):
            if rows is not None and transfer is not None:
                found[place] = hop.homes(rows, transfer.wait())
    return ExpertWeights._make(found)


class _Started(NamedTuple):
    """The state of the order inside, and the replicas on their way."""

    inner: Any
    fetch: _Fetch
    filler: SlotFiller


class BalancedOrder:
    """An `Order` around another one, whose rides have spare slots; see the module's docstring."""

    def __init__(self, inner: Order, spare: SpareSlots) -> None:
        self.inner, self.spare = inner, spare

    def start(
        self,
        x_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        slot_TK: torch.Tensor,
        weights: ExpertWeights,
        setup: RideSetup,
    ) -> _Started:
        slot_TK, plan = self.spare.assign(slot_TK, self.spare.costs(weights))
        replicas = ToHost(plan.expert_WS)
        inner = self.inner.start(x_TH, weight_TK, slot_TK, weights, setup)
        # Transports that send lists have waited for the device themselves.
        filler = self.spare.filler(replicas.read())
        return _Started(inner, _Fetch(weights, filler), filler)

    def forward(
        self, started: _Started, weights: ExpertWeights, setup: RideSetup, backward: bool
    ) -> tuple[torch.Tensor, tuple[SavedActivations, ...] | None]:
        y_TH, activations = self.inner.forward(started.inner, self._weights(started.fetch), setup, backward)
        if activations is not None:
            first = activations[0]
            activations = first._replace(route=_Ridden(first.route, started.filler)), *activations[1:]
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
        route, filler = first.route
        fetch = _Fetch(weights, filler)
        activations = first._replace(route=route), *activations[1:]
        coming, dslots = self.inner.backward(dy_TH, self._weights(fetch), activations, setup, needs_dweights)
        if dslots is None:
            return coming, None
        if callable(dslots):
            return coming, lambda: _send_home(dslots(), filler)
        # While the tokens' gradients travel.
        return coming, _send_home(dslots, filler)

    def _weights(self, fetch: _Fetch) -> Any:
        """Weights as the order inside takes them: to be waited for when experts need them, if it can."""
        return fetch if getattr(self.inner, "waits_for_weights", False) else fetch()
