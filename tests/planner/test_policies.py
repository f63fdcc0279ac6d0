"""Policies for a budget: the cheapest that fit, what they cost, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from carpool.planner.hardware import HARDWARE, LinkRate
from carpool.planner.kept import POLICIES, LayerSizes, kept_bytes
from carpool.planner.policies import Policies, choose_policies, combinations, policies_milliseconds

H100 = HARDWARE["H100"]
# Qwen3-30B-A3B on four ranks.
SIZES = LayerSizes(48, 48, 2048, 768, 8, 32, 4, 128, 2, copies=3.6)
TOKENS = 8192
OPEN = dict.fromkeys(POLICIES)
KEEP = dict.fromkeys(POLICIES, "keep")


def total(policies: Policies) -> int:
    return sum(size for item, size in kept_bytes(SIZES, TOKENS, policies).items() if item != "host")


def cost(policies: Policies) -> float:
    return policies_milliseconds(SIZES, TOKENS, policies, H100)


def test_combinations_mean_something_and_agree_with_what_is_given() -> None:
    every = combinations(OPEN)
    assert len(every) == 3 * 3 * 3 + 2 * 2 and every[0] == KEEP
    assert all(one["dense"] == "recompute" for one in every if one["sums"] == "recompute")
    given = combinations({**OPEN, "rows": "resend", "dense": "keep"})
    assert len(given) == 3 and all((one["rows"], one["dense"]) == ("resend", "keep") for one in given)


def test_more_room_never_costs_more_and_all_of_it_costs_nothing() -> None:
    most, least = total(KEEP), min(map(total, combinations(OPEN)))
    costs = []
    for tenth in range(11):
        budget = least + (most - least) * tenth // 10
        policies, why = choose_policies(budget, OPEN, total, cost)
        assert total(policies) <= budget
        assert cost(policies) == min(cost(one) for one in combinations(OPEN) if total(one) <= budget)
        assert f"{total(policies) // 2**20:,} of {budget // 2**20:,} MiB" in why
        costs.append(cost(policies))
    assert costs == sorted(costs, reverse=True) and costs[-1] == 0 < costs[-2] and policies == KEEP


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    with pytest.raises(ValueError, match=r"memory\.budget = 1,024 MiB is not enough under any policies") as caught:
        choose_policies(2**30, OPEN, total, cost)
    found = re.search(r"memory\.budget=(\d+)MiB, which takes (.*)$", str(caught.value))
    assert found is not None
    policies, _ = choose_policies(int(found[1]) * 2**20, OPEN, total, cost)
    assert found[2] == " ".join(f"memory.{item}={policy}" for item, policy in policies.items())
    with pytest.raises(ValueError, match="is not enough"):
        choose_policies((int(found[1]) - 1) * 2**20, OPEN, total, cost)


def test_what_each_policy_costs() -> None:
    layer = TOKENS * 2048 * 8 * 768 / H100.flops
    assert cost(KEEP) == 0
    assert cost(KEEP | {"hidden": "recompute"}) == pytest.approx(1e3 * 48 * 4 * layer)
    link = H100.rate("nvlink")
    ride = link.latency + 3.6 * TOKENS * 2048 * 2 / link.bytes_per_second
    assert cost(KEEP | {"rows": "resend"}) == pytest.approx(1e3 * 48 * ride)
    repeated = cost(KEEP | {"dense": "recompute", "sums": "recompute"}) - cost(KEEP | {"dense": "recompute"})
    assert repeated == pytest.approx(1e3 * 48 * (6 * layer + 2 * ride))


def test_copies_hide_behind_what_is_computed() -> None:
    away = KEEP | {"hidden": "offload"}
    # A link so fast that nothing is exposed, and one so slow that all of it is.
    fast, slow = (
        policies_milliseconds(SIZES, TOKENS, away, replace(H100, node=LinkRate(rate, 0.0))) for rate in (1e15, 1e9)
    )
    size = TOKENS * 8 * 2 * 768 * 2
    assert fast == pytest.approx(1e3 * 48 * 2 * size / H100.memory)  # type: ignore[operator]
    assert 0.9 * 1e3 * 48 * 2 * size / 1e9 < slow < 1.1 * 1e3 * 48 * 2 * size / 1e9
    # Two items share the link.
    rows, both = (
        policies_milliseconds(SIZES, TOKENS, one | {"rows": "offload"}, replace(H100, node=LinkRate(1e9, 0.0)))
        for one in (KEEP, away)
    )
    assert both > slow + rows
