"""Plans of spare slots: balance, cost, limits, and which copy serves which choice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks.placement import TRACES
from benchmarks.slot_plan import on_trace
from carpool.replicas.slot_costs import LARGEST, WORK, Costs
from carpool.replicas.slot_plan import SlotPlan, plan_slots, served_by

FREE = Costs()


def _choices(ranks: int, experts: int, top_k: int, tokens: int, skew: float, seed: int = 0) -> list[torch.Tensor]:
    """For each rank, (T, K) int32 choices by Zipf's law, some missing; the second rank has no tokens."""
    generator = torch.Generator().manual_seed(seed)
    share_E = (torch.randperm(experts, generator=generator) + 1.0) ** -skew
    found = []
    for rank in range(ranks):
        number = 0 if rank == 1 else tokens
        expert_TK = torch.empty(number, top_k, dtype=torch.int32)
        if number:
            expert_TK = torch.multinomial(share_E.expand(number, experts), top_k, generator=generator).int()
        found.append(expert_TK.masked_fill(torch.rand(expert_TK.shape, generator=generator) < 0.05, -1))
    return found


def _load(choices: list[torch.Tensor], experts: int) -> torch.Tensor:
    return torch.stack([torch.bincount(one[one >= 0].long(), minlength=experts) for one in choices])


def _homes(ranks: int, experts: int) -> torch.Tensor:
    return torch.arange(experts) * ranks // experts


def _largest(plan: SlotPlan) -> float:
    return (plan.load_W.max() / plan.load_W.double().mean().clamp(min=1)).item()


@pytest.mark.parametrize("costs", [FREE, Costs(trip=4, fetch=300), Costs(trip=4, fetch=300, limit=1100)], ids=str)
@pytest.mark.parametrize("skew", [0.0, 1.2, 4.0])
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "tokens", "spare"),
    [(2, 4, 2, 40, 1), (4, 16, 3, 64, 2), (8, 64, 8, 96, 4), (3, 7, 1, 50, 2)],
)
def test_copies_serve_what_the_plan_says(
    ranks: int, experts: int, top_k: int, tokens: int, spare: int, skew: float, costs: Costs
) -> None:
    choices, home_E = _choices(ranks, experts, top_k, tokens, skew), _homes(ranks, experts)
    load_WE = _load(choices, experts)
    plan = plan_slots(load_WE, home_E, spare, costs)
    served_P, load_W = torch.zeros(ranks * spare, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)
    for rank, expert_TK in enumerate(choices):
        slot_TK = served_by(expert_TK, load_WE, home_E, plan, rank)
        assert (slot_TK[expert_TK < 0] == -1).all()
        copied = slot_TK >= 0
        assert torch.equal(plan.expert_WS.flatten()[slot_TK[copied].long()], expert_TK[copied])
        served_P += torch.bincount(slot_TK[copied].long(), minlength=ranks * spare)
        where_TK = torch.where(copied, slot_TK // spare, home_E[expert_TK.clamp(min=0).long()].int())
        load_W += torch.bincount(where_TK[expert_TK >= 0].long(), minlength=ranks)
        # Own tokens come first: none travels to another copy while the own one serves another rank's.
        own = load_WE[rank]
        for slot, expert in enumerate(plan.expert_WS[rank].tolist()):
            if expert >= 0:
                mine = (slot_TK == rank * spare + slot).sum()
                assert mine == min(own[expert].item(), plan.choices_WS[rank, slot].item())
    assert torch.equal(served_P, plan.choices_WS.flatten().long())
    assert torch.equal(load_W, plan.load_W)
    # No copy at home, none twice on a rank, none without choices.
    for rank, named in enumerate(plan.expert_WS.tolist()):
        filled = [e for e in named if e >= 0]
        assert len(set(filled)) == len(filled) and all(home_E[e] != rank for e in filled)
    assert ((plan.choices_WS > 0) == (plan.expert_WS >= 0)).all()


@pytest.mark.parametrize("case", ["one expert takes all", "one rank takes half", "zipf", "nothing"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_balance_is_exact_where_slots_suffice(ranks: int, case: str) -> None:
    experts, home_E = 8 * ranks, _homes(ranks, 8 * ranks)
    load_WE = torch.zeros(ranks, experts, dtype=torch.int64)
    if case == "one expert takes all":
        load_WE[:, 3] = 1000
    elif case == "one rank takes half":
        load_WE[:, :8], load_WE[:, 8:] = 100 * (ranks - 1), 100
    elif case == "zipf":
        load_WE = _load(_choices(ranks, experts, 4, 512, 1.2), experts)
    plan = plan_slots(load_WE, home_E, 4, FREE)
    # Within one choice: the mean is rounded up.
    assert plan.load_W.max() <= -(-load_WE.sum() // ranks)
    assert plan.load_W.sum() == load_WE.sum()


def _cost(load_WE: torch.Tensor, home_E: torch.Tensor, plan: SlotPlan, costs: Costs) -> int:
    """Of the dearest rank, from the plan alone: own tokens are served first, at home and by copies."""
    ranks, load = len(load_WE), plan.load_W
    quota_E, own_W = load_WE.sum(0), torch.zeros(ranks, dtype=torch.int64)
    sent_W, fetched_W = torch.zeros(ranks, dtype=torch.int64), (plan.expert_WS >= 0).sum(1)
    for rank, named in enumerate(plan.expert_WS.tolist()):
        for slot, expert in enumerate(named):
            if expert >= 0:
                quota_E[expert] -= plan.choices_WS[rank, slot]
                own_W[rank] += min(load_WE[rank, expert].item(), plan.choices_WS[rank, slot].item())
                sent_W[home_E[expert]] += 1
    for expert, home in enumerate(home_E.tolist()):
        own_W[home] += min(load_WE[home, expert].item(), quota_E[expert].item())
    each_W = load * WORK + (load - own_W) * costs.trip + torch.maximum(fetched_W, sent_W) * costs.fetch
    return int(each_W.max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("costs", [Costs(3, 200), Costs(0, 3000), Costs(40, 10), Costs(0, 10**6)], ids=str)
def test_a_plan_is_never_dearer_than_none(costs: Costs, seed: int) -> None:
    home_E, load_WE = _homes(4, 32), _load(_choices(4, 32, 4, 200, 1.0, seed), 32)
    plan = plan_slots(load_WE, home_E, 3, costs)
    nothing = SlotPlan(
        torch.full((4, 3), -1),
        torch.zeros(4, 3),
        torch.zeros(4, dtype=torch.int64).scatter_add(0, home_E, load_WE.sum(0)),
    )
    copies = int((plan.expert_WS >= 0).sum())
    if costs.fetch == 10**6:
        assert not copies
    assert _cost(load_WE, home_E, plan, costs) < _cost(load_WE, home_E, nothing, costs) or not copies


def test_the_limit_is_worth_any_fetch() -> None:
    home_E, load_WE = _homes(4, 32), _load(_choices(4, 32, 4, 200, 1.2), 32)
    dear = 10**6
    assert _largest(plan_slots(load_WE, home_E, 3, Costs(0, dear))) > 1.3
    assert _largest(plan_slots(load_WE, home_E, 3, Costs(0, dear, limit=1100))) <= 1.1


def test_copies_stay_inside_their_node() -> None:
    home_E, load_WE = _homes(4, 16), torch.ones(4, 16, dtype=torch.int64)
    load_WE[:, :4] = 50
    nodes = torch.tensor([0, 0, 1, 1])
    plan = plan_slots(load_WE, home_E, 4, FREE, nodes)
    assert (plan.expert_WS[1] >= 0).any() and (plan.expert_WS[2:] == -1).all()
    assert plan.load_W.tolist() == [408, 408, 16, 16]


def test_tokens_that_visit_the_home_anyway_stay_there() -> None:
    """Expert 0 gives half of its choices away: those of tokens that choose expert 1 beside it stay."""
    home_E = torch.tensor([0, 0, 1, 1])
    expert_TK = torch.tensor([[0, -1], [0, 1], [0, -1], [0, 1]], dtype=torch.int32)
    load_WE = torch.stack([torch.tensor([4, 2, 0, 0]), torch.tensor([0, 0, 1, 1])])
    plan = SlotPlan(torch.tensor([[-1], [0]]), torch.tensor([[0], [2]]), torch.tensor([4, 4]))
    assert served_by(expert_TK, load_WE, home_E, plan, 0)[:, 0].tolist() == [1, -1, 1, -1]


def test_slots_have_the_names_that_a_transport_uses() -> None:
    load_WE, home_E = torch.tensor([[6, 2, 0, 0], [6, 0, 1, 1]]), torch.tensor([0, 0, 1, 1])
    plan = plan_slots(load_WE, home_E, 1, FREE)
    # Three slots of a rank: two homes, and a spare one.
    ids_N = torch.tensor([0, 1, 3, 4, 2, 5], dtype=torch.int32)
    expert_TK = torch.tensor([[0, -1]] * 6 + [[2, 3]], dtype=torch.int32)
    slot_TK = served_by(expert_TK, load_WE, home_E, plan, 1, ids_N)
    assert slot_TK.dtype == torch.int32 and slot_TK.tolist() == [[5, -1]] * 6 + [[3, 4]]


@pytest.mark.parametrize("name", list(LARGEST))
def test_costs_are_bounded(name: str) -> None:
    Costs(**{name: LARGEST[name]})
    for cost in (-1, LARGEST[name] + 1):
        with pytest.raises(ValueError, match=f"{name} of a plan's costs must be from 0 to {LARGEST[name]}, not {cost}"):
            Costs(**{name: cost})


def _optimum(load_E: torch.Tensor, home_E: torch.Tensor, ranks: int, spare: int) -> int:
    """The least possible largest load of a rank, of all ways to fill the slots.

    Given who holds an expert (a set of ranks, as bits), choices can be divided such that no rank has more than the
    largest, over all sets of ranks, of the choices that only they can serve, by their number (Hall's theorem)."""
    experts, home = range(len(load_E)), [1 << int(rank) for rank in home_E]
    fillings = []
    for rank in range(ranks):
        others = [e for e in experts if home[e] != 1 << rank]
        chosen = itertools.combinations(others, min(spare, len(others)))
        fillings.append(torch.tensor([[(e in named) << rank for e in experts] for named in chosen]))
    held_NE = torch.tensor(home).unsqueeze(0)
    for filling_NE in fillings:
        held_NE = (held_NE.unsqueeze(1) | filling_NE).flatten(0, 1)
    largest_N = torch.zeros(len(held_NE), dtype=torch.int64)
    for ranks_of_set in range(1, 1 << ranks):
        inside_N = ((held_NE & ~ranks_of_set) == 0).long() @ load_E
        largest_N = torch.maximum(largest_N, -(-inside_N // ranks_of_set.bit_count()))
    return int(largest_N.min())


@pytest.mark.parametrize(
    ("ranks", "experts", "spare", "worst", "mean"),
    [(2, 6, 1, 1.01, 1.01), (3, 6, 1, 1.15, 1.03), (3, 6, 2, 1.0, 1.0), (4, 8, 1, 1.2, 1.05)],
)
def test_plans_beside_the_optimum(ranks: int, experts: int, spare: int, worst: float, mean: float) -> None:
    """With one slot for each rank the greedy search may end early: a rank that has filled it cannot give and take."""
    home_E, ratios = _homes(ranks, experts), []
    for seed, skew in itertools.product(range(5), (0.5, 1.0, 2.0)):
        load_WE = _load(_choices(ranks, experts, 2, 100, skew, seed), experts)
        best = _optimum(load_WE.sum(0), home_E, ranks, spare)
        found = int(plan_slots(load_WE, home_E, spare, FREE).load_W.max())
        assert found >= best
        ratios.append(found / best)
    assert max(ratios) <= worst and sum(ratios) / len(ratios) <= mean, ratios


def test_plans_of_real_routing_are_those_of_the_documentation() -> None:
    path = Path(__file__).parents[2] / "docs" / "measurements" / "slot_plan.json"
    documented = {(row["trace"], row["ranks"], row["spare"]): row for row in json.loads(path.read_text())["quality"]}
    for ranks, spare in ((8, 1), (4, 2)):
        row = on_trace(TRACES / "e64-noaux-1615.npz", ranks, spare, FREE)
        assert row == documented["e64-noaux-1615", ranks, spare]
    assert all(row["worst_load"] <= 1.1 for row in documented.values() if row["spare"] > 1)
