"""What plans of published systems put into spare slots: by hand, by trying, and the contract that all keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from carpool.replicas.slot_costs import WORK, Costs
from carpool.replicas.slot_plan import SlotPlan, served_by
from carpool.replicas.slot_planners import SLOT_PLANNERS
from carpool.ride.balanced import SpareSlotOptions
from carpool_systems import spare_plans

OWN = ("shadow", "subset", "fetch", "all", "needed")
EARLIER = ("eplb", "expand_shrink", "symi", "mro")
COSTS = (Costs(), Costs(trip=40, fetch=200), Costs(trip=4, fetch=2000), Costs(trip=2**20, fetch=1))


def problem(seed: int, ranks: int = 4, experts: int = 12, tokens: int = 40) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two choices of each token, skewed, of each rank; and homes, of which one rank may have none."""
    generator = torch.Generator().manual_seed(seed)
    weight_E = torch.arange(1, experts + 1, dtype=torch.float64) ** -1.5
    weight_E = weight_E[torch.randperm(experts, generator=generator)]
    chosen = [weight_E.expand(tokens, -1).multinomial(2, generator=generator).int() for _ in range(ranks)]
    return chosen, torch.arange(experts) % (ranks - seed % 2)


def loads(chosen: Sequence[torch.Tensor], experts: int = 12) -> torch.Tensor:
    return torch.stack([torch.bincount(one.flatten().long(), minlength=experts) for one in chosen])


def plan(name: str, load_WE: Any, home_E: Any, spare: int, costs: Costs = COSTS[1], **options: Any) -> SlotPlan:
    return planned(SpareSlotOptions(spare, plan=name, options=options).planner(), load_WE, home_E, spare, costs)


def planned(planner: Any, load_WE: Any, home_E: Any, spare: int, costs: Costs = COSTS[1]) -> SlotPlan:
    load_WE, home_E = torch.as_tensor(load_WE).int(), torch.as_tensor(home_E).long()
    found: SlotPlan = planner.plan(load_WE, home_E, spare, costs, torch.arange(len(load_WE)) // 2)
    return found


def held(found: SlotPlan) -> set[tuple[int, int]]:
    """(rank, expert) of its replicas."""
    return {(w, e) for w, row in enumerate(found.expert_WS.tolist()) for e in row if e >= 0}


def own_cost(load_WE: torch.Tensor, home_E: torch.Tensor, held: set[tuple[int, int]], costs: Costs) -> int:
    """Of the dearest rank, choice by choice, if replicas serve their own rank."""
    rank_W = [[0, 0, 0, 0] for _ in load_WE]  # work, trips, fetched, sent
    for rank, load_E in enumerate(load_WE.tolist()):
        for expert, load in enumerate(load_E):
            at = rank if (rank, expert) in held else int(home_E[expert])
            rank_W[at][0] += load
            rank_W[at][1] += load * (at != rank)
    for rank, expert in held:
        rank_W[rank][2] += 1
        rank_W[int(home_E[expert])][3] += 1
    return max(w * WORK + t * costs.trip + max(f, s) * costs.fetch for w, t, f, s in rank_W)


@pytest.mark.parametrize("spare", [1, 3, 20])
@pytest.mark.parametrize("name", [*OWN, *EARLIER])
def test_the_contract(name: str, spare: int) -> None:
    """Slots are named once and not at home, and replicas serve what the plan says, whatever came before."""
    assert issubclass(SLOT_PLANNERS[name], spare_plans.SlotPlanner)
    planner = SpareSlotOptions(spare, plan=name, options={"every": 1} if name in EARLIER else {}).planner()
    filled = 0
    for seed in (0, 2, 4):
        chosen, home_E = problem(seed)
        load_WE = loads(chosen)
        for costs in COSTS:
            found = planned(planner, load_WE, home_E, spare, costs)
            assert found.expert_WS.shape == found.choices_WS.shape == (4, spare)
            filled += len(held(found))
            assert len(held(found)) == int((found.expert_WS >= 0).sum()), "an expert at most once on a rank"
            assert all(home_E[e] != w for w, e in held(found))
            slots = [served_by(one, load_WE, home_E, found, rank) for rank, one in enumerate(chosen)]
            served_P = sum(torch.bincount(one[one >= 0].flatten().long(), minlength=4 * spare) for one in slots)
            assert torch.equal(served_P, found.choices_WS.flatten().long())
            at_home_W = sum(
                torch.bincount(home_E[c[s < 0].long()], minlength=4) for c, s in zip(chosen, slots, strict=True)
            )
            assert torch.equal(found.load_W, at_home_W + found.choices_WS.sum(1))
            if name in OWN:
                assert all(s // spare == rank for rank, one in enumerate(slots) for s in one[one >= 0].tolist())
    assert filled or (name in ("fetch", "all") and spare < 20)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("costs", COSTS)
def test_shadow_takes_the_busiest_while_time_falls(costs: Costs, seed: int) -> None:
    chosen, home_E = problem(seed)
    load_WE = loads(chosen)
    shadowed: set[tuple[int, int]] = set()
    for expert in load_WE.sum(0).argsort(descending=True, stable=True).tolist():
        more = shadowed | {(w, expert) for w in range(4) if w != home_E[expert]}
        if own_cost(load_WE, home_E, more, costs) >= own_cost(load_WE, home_E, shadowed, costs):
            break
        if max(sum(w == rank for w, _ in more) for rank in range(4)) > 3:
            break
        shadowed = more
    assert held(plan("shadow", load_WE, home_E, 3, costs)) == shadowed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("costs", COSTS)
def test_subset_takes_the_best_pair_while_time_falls(costs: Costs, seed: int) -> None:
    ranks = 2 if seed == 3 else 4
    chosen, home_E = problem(2 * seed, ranks)
    load_WE = loads(chosen)
    found: set[tuple[int, int]] = set()
    while True:
        pairs = [(w, e) for w in range(ranks) for e in range(12)]
        pairs = [(w, e) for w, e in pairs if home_E[e] != w and (w, e) not in found and load_WE[w, e]]
        pairs = [one for one in pairs if sum(w == one[0] for w, _ in found) < 3]
        times = [own_cost(load_WE, home_E, found | {one}, costs) for one in pairs]
        if not times or min(times) >= own_cost(load_WE, home_E, found, costs):
            break
        found |= {pairs[int(np.argmin(times))]}
    assert held(plan("subset", load_WE, home_E, 3, costs)) == found


def test_fetch_takes_all_or_nothing() -> None:
    chosen, home_E = problem(0)
    load_WE = loads(chosen)
    wanted = {(w, e) for w in range(4) for e in range(12) if load_WE[w, e] and home_E[e] != w}
    most = max(sum(w == rank for w, _ in wanted) for rank in range(4))
    assert held(plan("fetch", load_WE, home_E, most, Costs(trip=40, fetch=1))) == wanted
    assert not held(plan("fetch", load_WE, home_E, most, Costs(trip=40, fetch=100_000))), "tokens are cheaper"
    assert not held(plan("fetch", load_WE, home_E, most - 1, Costs(trip=40, fetch=1))), "there is no room for all"


def test_all_takes_every_expert_or_nothing() -> None:
    chosen, home_E = problem(0)
    load_WE = loads(chosen)
    load_WE[1] = 0
    every = {(w, e) for w in range(4) for e in range(12) if home_E[e] != w}
    assert held(plan("all", load_WE, home_E, 12, Costs(trip=40, fetch=1))) == every, "whether it is wanted or not"
    assert not held(plan("all", load_WE, home_E, 12, Costs(trip=40, fetch=100_000))), "tokens are cheaper"


def test_needed_takes_what_most_of_the_own_tokens_want() -> None:
    load_WE, home_E = [[9, 0, 1, 5], [4, 4, 2, 0]], [0, 0, 1, 1]
    assert held(plan("needed", load_WE, home_E, 1, Costs(fetch=2**30))) == {(0, 3), (1, 0)}, "whatever it costs"
    assert held(plan("needed", load_WE, home_E, 4)) == {(0, 2), (0, 3), (1, 0), (1, 1)}


def test_eplb_symi_and_mro_share_earlier_loads() -> None:
    """EPLB's own example; SYMI gives an expert as many copies as its share of the slots, and
    Lazarus two at least."""
    first, then, home_E = [[4, 1, 1, 0], [4, 1, 0, 1]], [[0, 0, 5, 1], [0, 0, 3, 3]], [0, 0, 1, 1]
    planner = SpareSlotOptions(1, plan="eplb", options={"every": 2}).planner()
    assert [held(planned(planner, load, home_E, 1)) for load in (first, first)] == [set(), set()]
    # Of 8, 2, 1, 1: expert 0 twice; then expert 1, which rank 1, whose slot is taken, does not hold.
    assert held(found := planned(planner, first, home_E, 1)) == {(1, 0)}
    assert found.choices_WS.tolist() == [[0], [4]]
    assert held(found := planned(planner, then, home_E, 1)) == {(1, 0)} and found.choices_WS.sum() == 0
    assert held(planned(planner, then, home_E, 1)) == {(1, 0), (0, 2)}, "of 4, 0, 4, 2 on average"
    load_E, home_E = np.array([60, 20, 10, 10]), np.array([0, 1, 2, 3])
    next_WE = spare_plans.Symi().change(np.tile(load_E, (4, 1)), np.zeros((4, 4), bool), home_E, 1, Costs())
    assert next_WE.sum(0).tolist() == [3, 1, 0, 0], "of 8 slots: 4.8, but 4 ranks; 1.6; 0.8; 0.8"
    lazarus = spare_plans.MaximumRankOverlap()
    next_WE = lazarus.change(np.tile(load_E, (4, 1)), np.zeros((4, 4), bool), home_E, 1, Costs())
    assert next_WE.tolist() == [[e == other for e in range(4)] for other in (1, 0, 3, 2)], "two of each, in pairs"


def test_expand_shrink_follows_the_load() -> None:
    home_E, costs = np.array([0, 0, 1, 1, 2, 2, 3, 3]), Costs(trip=4, fetch=16)
    flat, hot = np.full((4, 8), 10), np.tile([110, 10, 10, 10, 10, 10, 10, 10], (4, 1))
    none = np.zeros((4, 8), bool)
    planner = spare_plans.ExpandShrink()
    assert not planner.change(flat, none, home_E, 2, costs).any()
    copies = planner.change(hot, none, home_E, 2, costs)
    assert copies[:, 0].any() and copies.sum(1).max() <= 2
    served_W, _ = spare_plans._cost(hot, copies, home_E, costs)
    assert served_W.max() < 0.6 * spare_plans._cost(hot, none, home_E, costs)[0].max()
    # What was hot is not any more: its copies make room.
    later = planner.change(np.roll(hot, 2, axis=1), copies, home_E, 2, costs)
    assert later[:, 2].any() and not (later[:, 0] & ~copies[:, 0]).any()
    assert (planner.change(flat, copies, home_E, 2, costs) == copies).all(), "nobody is too full"


def test_a_recomputed_layer_has_the_plan_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, home_E = problem(0)
    load_WE = loads(chosen)
    planner = SpareSlotOptions(2, plan="symi").planner()
    plans = [planned(planner, load_WE + number, home_E, 2) for number in range(3)]
    monkeypatch.setattr(spare_plans, "in_recompute", lambda: True)
    for number in (1, 0, 2):
        assert planned(planner, load_WE + number, home_E, 2) is plans[number]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("eplb", {"every": 0}, "every=0"), ("shadow", {"every": 1}, "no option 'every'"), ("needed", {"x": 1}, "'x'")],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpareSlotOptions(1, plan=name, options=options)
