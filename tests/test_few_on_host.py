"""Experts with few tokens on the CPU: the answer in float64, and device memory that they do not need."""

from __future__ import annotations

from copy import copy

import pytest
import torch

from carpool.experts import ExpertWeights, make_activation, make_experts
from carpool_systems.few_on_host import FewOnHost
from tests.experts_problem import PATTERNS, ExpertProblem

SWIGLU = make_activation("silu", gated=True)


@pytest.mark.parametrize(("frozen", "all_rows"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_some_slots_are_computed_where_their_weights_are(pattern: str, frozen: bool, all_rows: bool) -> None:
    ranks = (3, 5) if frozen else (0, 0)
    problem = ExpertProblem(pattern, 37, 19, SWIGLU, True, torch.float32, transposed=frozen, ranks=ranks, frozen=frozen)
    few = [slot for slot in (0, 3) if slot < problem.weights.up_SFH.shape[0]]
    asked = []

    def host(slot: int) -> ExpertWeights:
        asked.append(slot)
        return ExpertWeights.of(None if w is None else w[slot] for w in problem.weights[:4])

    there = copy(problem)
    if frozen:
        # Nothing of them has come.
        there.weights = ExpertWeights._make(None if w is None else w.clone() for w in problem.weights)
        for weight in there.weights[:4]:
            assert weight is not None
            weight[few] = torch.nan
    experts = FewOnHost(make_experts("grouped", problem.function), problem.function, lambda: few, host)
    got = there.run(experts, use_arena=True, all_rows=all_rows)
    problem.check(got, 1e-5, all_rows)
    again = there.run(experts, use_arena=True, all_rows=all_rows)
    assert all(torch.equal(value.nan_to_num(), again[name].nan_to_num()) for name, value in got.items())
    assert set(asked) == set(few) if pattern in ("random", "full", "one column") else set(asked) <= set(few)


def test_without_any_it_is_the_experts_beside() -> None:
    problem = ExpertProblem("random", 32, 24, SWIGLU, False, torch.float32)
    inner = make_experts("grouped", problem.function)
    beside = FewOnHost(inner, problem.function, list, lambda _: pytest.fail("nothing is asked for"))
    ours, theirs = (problem.run(experts, True, True) for experts in (beside, inner))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
