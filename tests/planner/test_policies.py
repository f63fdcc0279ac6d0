"""Policies for a budget: the cheapest that fit, what they cost, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import POLICIES, Candidate
from carpool.planner.decisions.rules import Policies, choose_policies, combinations, modelled_milliseconds
from carpool.planner.machine.hardware import HARDWARE, LinkRate
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import predict
from tests.planner.step_problem import shape

H100 = HARDWARE["H100"]
# Qwen3-30B-A3B on four ranks.
SHAPE, CANDIDATE = shape("qwen3-30b-a3b"), Candidate(Degrees(fsdp=4, ep=4), 4096, 2, 3)
TOKENS = CANDIDATE.micro_tokens
OPEN = dict.fromkeys(POLICIES)
KEEP = dict.fromkeys(POLICIES, "save")
COSTS = modelled_milliseconds(SHAPE, H100, CANDIDATE, 4)


@cache
def _total(*policies: str) -> int:
    one = replace(CANDIDATE, policies=dict(zip(POLICIES, policies, strict=True)))
    return int(memory_of(SHAPE, one).parts["activations"])


def total(policies: Policies) -> int:
    return _total(*(policies[item] for item in POLICIES))


@cache
def _cost(*policies: str) -> float:
    return COSTS(dict(zip(POLICIES, policies, strict=True)))


def cost(policies: Policies) -> float:
    return _cost(*(policies[item] for item in POLICIES))


def test_combinations_mean_something_and_agree_with_what_is_given() -> None:
    every = combinations(OPEN)
    assert len(every) == 3 * 3 * 3 + 2 * 2 and every[0] == KEEP
    assert all(one["layer_activations"] == "recompute" for one in every if one["moe_outputs"] == "recompute")
    given = combinations({**OPEN, "expert_inputs": "resend", "layer_activations": "save"})
    assert len(given) == 3 and all(
        (one["expert_inputs"], one["layer_activations"]) == ("resend", "save") for one in given
    )


def test_more_room_never_costs_more_and_all_of_it_costs_nothing() -> None:
    most, least = total(KEEP), min(map(total, combinations(OPEN)))
    costs = []
    for tenth in range(11):
        budget = least + (most - least) * tenth // 10
        policies, why = choose_policies(budget, OPEN, total, cost)
        assert total(policies) <= budget
        least_cost = min(cost(one) for one in combinations(OPEN) if total(one) <= budget)
        assert cost(policies) == pytest.approx(least_cost, abs=1e-6)
        assert f"{total(policies) // 2**20:,} of {budget // 2**20:,} MiB" in why
        costs.append(round(cost(policies), 6))
    assert costs == sorted(costs, reverse=True) and costs[-1] == 0 < costs[0] and policies == KEEP


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    with pytest.raises(ValueError, match=r"memory\.budget = 1,024 MiB is not enough under any policies") as caught:
        choose_policies(2**30, OPEN, total, cost)
    found = re.search(r"memory\.budget=(\d+)MiB, which takes (.*)$", str(caught.value))
    assert found is not None
    policies, _ = choose_policies(int(found[1]) * 2**20, OPEN, total, cost)
    assert found[2] == " ".join(f"memory.{item}={policy}" for item, policy in policies.items())
    with pytest.raises(ValueError, match="is not enough"):
        choose_policies((int(found[1]) - 1) * 2**20, OPEN, total, cost)


def test_costs_are_those_of_predicted_steps() -> None:
    """One model of costs: what a policy adds is the difference of two predicted steps of one micro-batch."""
    one = replace(CANDIDATE, accumulation=1)
    assert cost(KEEP) == 0

    def step(**policies: str) -> float:
        return 1e3 * predict(SHAPE, H100, replace(one, policies=KEEP | policies), 4).seconds.middle

    for policies in (
        {"expert_activations": "recompute"},
        {"expert_inputs": "resend"},
        {"layer_activations": "recompute", "moe_outputs": "recompute"},
    ):
        assert cost(KEEP | policies) == pytest.approx(step(**policies) - step(), rel=1e-6)
        assert cost(KEEP | policies) > 1


def test_copies_hide_behind_what_is_computed() -> None:
    away = {"expert_activations": "offload", "expert_inputs": "offload"}
    fast, slow, slower = (
        modelled_milliseconds(SHAPE, replace(H100, host=LinkRate(rate, 0.0)), CANDIDATE, 4)(KEEP | away)
        for rate in (1e15, 1e9, 0.5e9)
    )
    size = TOKENS * (8 * 2 * 768 * 2 + 4 * (1 - (3 / 4) ** 8) * 2048 * 2)
    # A copy for each of 48 layers out and back, of which little hides; a link of half the rate takes as much again.
    assert slower - slow == pytest.approx(1e3 * 2 * 48 * size / 1e9, rel=0.05)
    assert 0 <= fast < 0.05 * slow
