"""What published systems put into spare slots, for each micro-batch and layer (`moe.spare_plan`).

    shadow         FasterMoE (PPoPP 2022): the busiest experts on all ranks, one after another while the modelled time
                   falls
    subset         Prophet (CLUSTER 2023): the (expert, rank) that lowers the time most, one after another while it
                   falls
    fetch          Janus (SIGCOMM 2023): all experts to all ranks whose tokens want them, so that tokens stay, or none,
                   so that tokens travel, whichever is modelled faster
    all            Tutel (MLSys 2023), where there are no more ranks than experts: the same with every expert on every
                   rank, wanted or not: data parallelism, or expert parallelism
    needed         Hecate (FSSDP) and LAER-MoE: each rank fetches the experts that most of its own tokens want
    eplb           DeepSeek-V3's EPLB: each slot goes to the expert with the largest load of a copy, and copies by
                   falling load to the rank with the least
    expand_shrink  FlexMoE (SIGMOD 2023): while time falls, the best of: one copy more, one less, one elsewhere, one in
                   the place of another; only if the fullest rank exceeds the mean by a tenth
    symi           SYMI (2025): as many copies of an expert as its share of the load
    mro            Lazarus (2024): the same, but no expert with fewer than two where slots suffice, at the places of its
                   maximum rank overlap (`rank_overlap`): most experts outlive a rank

Replicas of the first five serve the tokens of their own rank, and follow from the loads at hand, by tensor operations
without a wait for the device. The last four share an expert's load equally among its copies, and follow from earlier
loads: those of so many micro-batches as `every` says decide for the next ones. They are computed on the host, and are
not part of checkpoints: a run that is resumed begins without replicas, with sums that are equal to rounding.

The modelled time is that of `carpool.replicas.slot_plan`: of the dearest rank, its experts' work, the trips of choices
that come to it, and the experts that it fetches or sends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from carpool.metrics.counters import in_recompute
from carpool.replicas.slot_costs import WORK, Costs
from carpool.replicas.slot_plan import SlotPlan
from carpool.replicas.slot_planners import SlotPlanner
from carpool_systems.rank_overlap import allocate, place

Array = npt.NDArray[Any]
# Plans that are remembered for layers that are computed again in the backward.
REMEMBERED = 64
# Copies of an expert that Lazarus wants at least.
FEWEST = 2
# The load of the fullest rank over the mean at which FlexMoE changes anything.
TRIGGER = 1.1


class _Ranks:
    """The cost of each rank, where replicas serve the tokens of their own rank alone.

    Attributes, all (W,) int64:
        load: choices that it serves;  trips: those of them that come from other ranks.
        fetched, sent: experts.
    """

    def __init__(self, load_WE: torch.Tensor, home_E: torch.Tensor, costs: Costs) -> None:
        self.home_E, self.costs, self.none = home_E, costs, load_WE.new_zeros(len(load_WE))
        self.load = self.none.scatter_add(0, home_E, load_WE.sum(0))
        self.trips = self.load - self.none.scatter_add(0, home_E, load_WE.gather(0, home_E.unsqueeze(0))[0])
        self.fetched = self.sent = self.none

    def cost(self) -> torch.Tensor:
        """(W,) in the units of `Costs`."""
        costs = self.costs
        return self.load * WORK + self.trips * costs.trip + torch.maximum(self.fetched, self.sent) * costs.fetch

    def hold(self, load_WE: torch.Tensor, held_WE: torch.Tensor) -> None:
        """Replicas come: (W, E) bool, never where the home is."""
        served_WE = load_WE * held_WE
        gone_W = self.none.scatter_add(0, self.home_E, served_WE.sum(0))
        self.load = self.load + served_WE.sum(1) - gone_W
        self.trips = self.trips - gone_W
        self.fetched = self.fetched + held_WE.sum(1)
        self.sent = self.sent + self.none.scatter_add(0, self.home_E, held_WE.sum(0))


def _away(load_WE: torch.Tensor, home_E: torch.Tensor) -> torch.Tensor:
    """(W, E) bool: whether the expert's home is another rank."""
    return torch.arange(len(load_WE), device=load_WE.device).unsqueeze(1) != home_E


def _plan(
    held_WE: torch.Tensor, served_WE: torch.Tensor, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int
) -> SlotPlan:
    """The plan of the replicas that ranks hold, at most `spare` each, and of the choices that these serve."""
    served_WE = served_WE * held_WE
    order_WS = held_WE.long().argsort(dim=1, descending=True, stable=True)[:, :spare]
    filled_WS = held_WE.gather(1, order_WS)
    width = 0, spare - order_WS.shape[1]
    expert_WS = torch.nn.functional.pad(torch.where(filled_WS, order_WS, -1), width, value=-1)
    choices_WS = torch.nn.functional.pad(served_WE.gather(1, order_WS), width)
    home_W = load_WE.new_zeros(len(load_WE)).scatter_add(0, home_E, load_WE.sum(0) - served_WE.sum(0))
    return SlotPlan(expert_WS.int(), choices_WS.int(), home_W + served_WE.sum(1))


class Shadow(SlotPlanner):
    name = "shadow"

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        load_WE = load_WE.long()
        busiest_K = load_WE.sum(0).argsort(descending=True, stable=True)
        # What the first k experts change, for all k at once.
        away_KW = _away(load_WE, home_E).T[busiest_K].long()
        served_KW = load_WE.T[busiest_K] * away_KW
        gone_KW = (1 - away_KW) * served_KW.sum(1, keepdim=True)
        ranks = _Ranks(load_WE, home_E, costs)
        alone = ranks.cost().max()
        ranks.load = ranks.load + (served_KW - gone_KW).cumsum(0)
        ranks.trips = ranks.trips - gone_KW.cumsum(0)
        ranks.fetched, ranks.sent = away_KW.cumsum(0), (1 - away_KW).cumsum(0) * (len(load_WE) - 1)
        cost_K = ranks.cost().max(1).values
        falls_K = cost_K < torch.cat([alone.unsqueeze(0), cost_K[:-1]])
        taken_K = (falls_K & (ranks.fetched.max(1).values <= spare)).long().cumprod(0).bool()
        held_E = torch.zeros_like(taken_K).scatter(0, busiest_K, taken_K)
        return _plan(held_E & _away(load_WE, home_E), load_WE, load_WE, home_E, spare)


class Subset(SlotPlanner):
    name = "subset"

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        load_WE = load_WE.long()
        num_ranks, num_experts = load_WE.shape
        rank_W1 = torch.arange(num_ranks, device=load_WE.device).unsqueeze(1)
        away_WE = _away(load_WE, home_E)
        held_WE = torch.zeros_like(away_WE)
        ranks = _Ranks(load_WE, home_E, costs)
        for _ in range(num_ranks * spare):
            cost_W = ranks.cost()
            open_WE = away_WE & ~held_WE & (load_WE > 0) & (ranks.fetched < spare).unsqueeze(1)
            busy_W, fetched_W, sent_W = ranks.load * WORK + ranks.trips * costs.trip, ranks.fetched, ranks.sent
            here_WE = (busy_W + torch.maximum(fetched_W + 1, sent_W) * costs.fetch).unsqueeze(1) + load_WE * WORK
            home_W = busy_W + torch.maximum(fetched_W, sent_W + 1) * costs.fetch
            there_WE = home_W[home_E] - load_WE * (WORK + costs.trip)
            # Of the other ranks, the dearest of the three dearest of all.
            others_WE = torch.zeros_like(load_WE)
            for value, rank in zip(*(one.flip(0) for one in cost_W.topk(min(3, num_ranks))), strict=True):
                others_WE = torch.where((rank_W1 == rank) | (home_E == rank), others_WE, value)
            time_WE = torch.maximum(torch.maximum(here_WE, there_WE), others_WE)
            time_WE = torch.where(open_WE, time_WE, torch.iinfo(torch.int64).max)
            time, best = time_WE.flatten().min(0)
            better = time < cost_W.max()
            # On a GPU the host would have to wait to know.
            if load_WE.device.type == "cpu" and not better:
                break
            more_WE = torch.zeros_like(held_WE).view(-1).scatter(0, best.unsqueeze(0), better.unsqueeze(0))
            more_WE = more_WE.view(num_ranks, num_experts)
            ranks.hold(load_WE, more_WE)
            held_WE = held_WE | more_WE
        return _plan(held_WE, load_WE, load_WE, home_E, spare)


class Fetch(SlotPlanner):
    name = "fetch"

    def wanted(self, load_WE: torch.Tensor) -> torch.Tensor:
        """(W, E) bool: what each rank fetches if ranks fetch at all."""
        return load_WE > 0

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        load_WE = load_WE.long()
        wanted_WE = _away(load_WE, home_E) & self.wanted(load_WE)
        ranks = _Ranks(load_WE, home_E, costs)
        travel = ranks.cost().max()
        ranks.hold(load_WE, wanted_WE)
        fetch = (ranks.fetched.max() <= spare) & (ranks.cost().max() < travel)
        return _plan(wanted_WE & fetch, load_WE, load_WE, home_E, spare)


class All(Fetch):
    name = "all"

    def wanted(self, load_WE: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(load_WE, dtype=torch.bool)


class Needed(SlotPlanner):
    name = "needed"

    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        load_WE = load_WE.long()
        wanted_WE = load_WE * _away(load_WE, home_E)
        most_WS = wanted_WE.argsort(dim=1, descending=True, stable=True)[:, :spare]
        held_WE = torch.zeros_like(wanted_WE, dtype=torch.bool).scatter(1, most_WS, wanted_WE.gather(1, most_WS) > 0)
        return _plan(held_WE, load_WE, load_WE, home_E, spare)


class _FromEarlier(SlotPlanner):
    """Replicas that follow from the loads of earlier micro-batches.

    Args:
        every: micro-batches between two changes.
    """

    on_host = True
    options: ClassVar[Mapping[str, Any]] = {"every": int}

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every} micro-batches between two changes of replicas must be 1 at least")
        self.every = every
        self._rides = 0
        self._held_WE: Array | None = None
        self._sum_WE: Array | None = None
        # A layer that is computed again in the backward needs the plan of its forward.
        self._plans: OrderedDict[bytes, SlotPlan] = OrderedDict()

    def change(self, load_WE: Array, held_WE: Array, home_E: Array, spare: int, costs: Costs) -> Array:
        """(W, E) bool: the next replicas, never where the home is.

        Args:
            load_WE: of a micro-batch, on average of the last ones.
            held_WE: bool, the present replicas."""
        raise NotImplementedError

    @torch._disable_dynamo
    def plan(
        self, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, costs: Costs, node_W: torch.Tensor
    ) -> SlotPlan:
        seen_WE, device = load_WE.long().cpu(), load_WE.device
        key = seen_WE.numpy().tobytes()
        if in_recompute() and key in self._plans:
            return self._plans[key]
        loads_WE = seen_WE.numpy()
        held_WE = np.zeros(loads_WE.shape, dtype=bool) if self._held_WE is None else self._held_WE
        share_E = torch.from_numpy(loads_WE.sum(0) // (1 + held_WE.sum(0)))
        found = _plan(torch.from_numpy(held_WE), share_E.expand(len(held_WE), -1), seen_WE, home_E.cpu(), spare)
        self._sum_WE = loads_WE if self._sum_WE is None else self._sum_WE + loads_WE
        self._rides += 1
        if self._rides % self.every == 0:
            mean_WE, self._sum_WE = self._sum_WE // self.every, None
            self._held_WE = self.change(mean_WE, held_WE, home_E.cpu().numpy(), spare, costs)
        self._plans[key] = found = SlotPlan._make(one.to(device) for one in found)
        self._plans.move_to_end(key)
        if len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)
        return found


def pack_copies(copies_E: Array, load_E: Array, home_E: Array, num_ranks: int, spare: int) -> Array:
    """(W, E) bool: replicas beside the homes, by falling load of a copy, each on the rank with the least load that has
    a slot left and does not hold the expert.

    Args:
        copies_E: of each expert, the home included."""
    share_E = load_E / copies_E
    load_W = np.bincount(home_E, weights=share_E, minlength=num_ranks)
    held_WE = np.zeros((num_ranks, len(load_E)), dtype=bool)
    for expert in np.argsort(-share_E, kind="stable"):
        for _ in range(copies_E[expert] - 1):
            free_W = (held_WE.sum(1) < spare) & ~held_WE[:, expert]
            free_W[home_E[expert]] = False
            if not free_W.any():
                break  # only ranks that hold it have slots left
            rank = int(np.where(free_W, load_W, np.inf).argmin())
            held_WE[rank, expert] = True
            load_W[rank] += share_E[expert]
    return held_WE


class Eplb(_FromEarlier):
    name = "eplb"

    def __init__(self, every: int = 50) -> None:
        super().__init__(every)

    def change(self, load_WE: Array, held_WE: Array, home_E: Array, spare: int, costs: Costs) -> Array:
        load_E, num_ranks = load_WE.sum(0), len(load_WE)
        copies_E = np.ones(len(load_E), dtype=np.int64)
        for _ in range(num_ranks * spare):
            share_E = np.where(copies_E < num_ranks, load_E / copies_E, -1.0)
            if share_E.max() < 0:
                break  # every expert is everywhere
            copies_E[share_E.argmax()] += 1
        return pack_copies(copies_E, load_E, home_E, num_ranks, spare)


class Symi(_FromEarlier):
    name = "symi"

    def change(self, load_WE: Array, held_WE: Array, home_E: Array, spare: int, costs: Costs) -> Array:
        load_E, num_ranks = load_WE.sum(0), len(load_WE)
        slots = len(load_E) + num_ranks * spare
        share_E = load_E * slots / max(1, load_E.sum())
        copies_E = np.clip(share_E.astype(np.int64), 1, num_ranks)
        # Slots that are left go to the largest remainders.
        left = max(0, slots - int(copies_E.sum()))
        rest_E = np.where(copies_E < num_ranks, share_E - copies_E, -np.inf)
        more = [expert for expert in np.argsort(-rest_E, kind="stable")[:left] if rest_E[expert] > 0]
        copies_E[more] += 1
        return pack_copies(copies_E, load_E, home_E, num_ranks, spare)


class ExpandShrink(_FromEarlier):
    name = "expand_shrink"

    def __init__(self, every: int = 10) -> None:
        super().__init__(every)

    def change(self, load_WE: Array, held_WE: Array, home_E: Array, spare: int, costs: Costs) -> Array:
        served_W, time = _cost(load_WE, held_WE, home_E, costs)
        if served_W.max() <= TRIGGER * served_W.mean():
            return held_WE
        while True:
            # A change of a few (rank, expert) that are held then, or no longer.
            candidates = [flipped for flipped in _flips(served_W, held_WE, home_E) if flipped.sum(1).max() <= spare]
            costs_N = [_cost(load_WE, one, home_E, costs)[1] for one in candidates]
            if not candidates or min(costs_N) >= time:
                return held_WE
            held_WE = candidates[int(np.argmin(costs_N))]
            served_W, time = _cost(load_WE, held_WE, home_E, costs)


class MaximumRankOverlap(_FromEarlier):
    name = "mro"

    def __init__(self, every: int = 50) -> None:
        super().__init__(every)

    def change(self, load_WE: Array, held_WE: Array, home_E: Array, spare: int, costs: Costs) -> Array:
        num_ranks = len(load_WE)
        homes_W = [set(np.flatnonzero(home_E == rank).tolist()) for rank in range(num_ranks)]
        slots = max(map(len, homes_W)) + spare
        copies_E = allocate(load_WE.sum(0).tolist(), num_ranks * slots, FEWEST, num_ranks)
        found_WE = np.zeros_like(held_WE)
        for rank, (its, homes) in enumerate(zip(place(copies_E, slots, homes_W), homes_W, strict=True)):
            # A home that is elsewhere than the rule wants it takes a slot more: then those with most copies stay away.
            found_WE[rank, sorted(its - homes, key=lambda one: copies_E[one])[:spare]] = True
        return found_WE


def _cost(load_WE: Array, held_WE: Array, home_E: Array, costs: Costs) -> tuple[Array, int]:
    """(W,) choices that each rank serves, and the modelled time, if copies share an expert's load equally."""
    expert_E, copies_E = np.arange(len(home_E)), 1 + held_WE.sum(0)
    share_E = load_WE.sum(0) // copies_E
    served_WE = held_WE * share_E
    served_WE[home_E, expert_E] = load_WE.sum(0) - share_E * (copies_E - 1)
    served_W, own_W = served_WE.sum(1), np.minimum(served_WE, load_WE).sum(1)
    sent_W = np.bincount(home_E, weights=held_WE.sum(0), minlength=len(load_WE)).astype(np.int64)
    cost_W = served_W * WORK + (served_W - own_W) * costs.trip + np.maximum(held_WE.sum(1), sent_W) * costs.fetch
    return served_W, int(cost_W.max())


def _flips(served_W: Array, held_WE: Array, home_E: Array) -> Iterator[Array]:
    """FlexMoE's changes: expand, shrink, migrate, and a replica in the place of another."""
    fullest, coldest = int(served_W.argmax()), int(served_W.argmin())
    of_fullest_E = held_WE[fullest] | (home_E == fullest)
    free_WE = ~held_WE & of_fullest_E & (np.arange(len(held_WE))[:, None] != home_E)
    more = [(w, e) for w, e in np.argwhere(free_WE).tolist()]
    less = [(w, e) for w, e in np.argwhere(held_WE).tolist()]
    changes: list[list[tuple[int, int]]] = [*([one] for one in more), *([one] for one in less)]
    changes += [[one, new] for one in less for new in more if new[0] == one[0]]
    changes += [[(w, e), (coldest, e)] for w, e in less if not held_WE[coldest, e] and home_E[e] != coldest]
    for change in changes:
        flipped = held_WE.copy()
        for rank, expert in change:
            flipped[rank, expert] ^= True
        yield flipped
