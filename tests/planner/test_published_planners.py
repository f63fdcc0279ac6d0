"""Published planners, each by what its paper says that it does, beside the fastest plan of the same space; and policies
for a budget of memory: the cheapest that fit, what they cost, and what is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import POLICIES, Candidate
from carpool.planner.decisions.rules import Policies, choose_policies, combinations, modelled_milliseconds
from carpool.planner.machine.hardware import HARDWARE, LinkRate, find_hardware
from carpool.planner.model.routes import Routes
from carpool.planner.search.enumeration import Enumeration
from carpool.planner.search.plan import Plan, plan
from carpool.planner.search.space import PLANNERS, Problem, Space, read_constraints
from carpool.planner.step.lengths import Lengths
from carpool.planner.step.peak import memory_of
from carpool.planner.step.prediction import predict
from carpool_systems.planners import Pieces, _stages, chunked, fsmoe, roofline, tutel
from tests.planner.step_problem import shape

SHAPE = shape("qwen3-30b-a3b", 4)
H100 = find_hardware("H100")
NUMBERS: dict[str, Any] = {"gpus": 16, "tokens": 64 * 4096, "sequence_length": 4096, "memory": 18e9}


SMALL = Space(pp=(1, 2), tp=(1,), cp=(1,), etp=(1,), micro_batches=(1, 2))


def chosen(name: str | None, **changed: Any) -> Plan:
    system = None if name is None else PLANNERS[name]
    return plan(SHAPE, H100, **{**NUMBERS, **changed}, best=1, space=SMALL, system=system).plans[0]


@pytest.fixture(scope="module")
def fastest() -> Plan:
    return chosen(None)


@pytest.mark.parametrize("name", PLANNERS)
def test_no_policy_finds_a_faster_plan_that_fits(name: str, fastest: Plan) -> None:
    one = chosen(name)
    # Some may choose what the search leaves to a run: numbers of chunks, dense tensors in host memory.
    least = 0.95 if name in ("mist", "fsmoe") else 1 - 1e-9
    assert one.prediction.seconds.middle >= least * fastest.prediction.seconds.middle
    assert one.memory.total <= NUMBERS["memory"] and one.candidate.tokens == NUMBERS["tokens"]
    assert PLANNERS[name].source and PLANNERS[name].chooses


def candidates(name: str) -> tuple[list[Candidate], Problem]:
    system = PLANNERS[name]
    problem = Problem(SHAPE, H100, 16, 8, 64, 4096, NUMBERS["memory"], Routes())
    return list(Enumeration(problem, system.restrict(SMALL, SHAPE), system).candidates()), problem


def test_alpa_takes_what_communicates_least_within_a_stage(fastest: Plan) -> None:
    every, problem = candidates("alpa")
    one = chosen("alpa").candidate

    def travels(other: Candidate) -> float:
        return sum(seconds for _, seconds in _stages(problem.lengths(other)))

    same = [other for other in every if (other.degrees.pp, other.accumulation) == (one.degrees.pp, one.accumulation)]
    assert travels(one) == min(map(travels, same)) < travels(fastest.candidate)
    assert len({other.degrees.ep for other in same}) > 2


def test_mist_computes_whole_layers_again_where_experts_alone_would_do(fastest: Plan) -> None:
    tight = 9e9
    mist, best = chosen("mist", memory=tight), chosen(None, memory=tight)
    assert {mist.candidate.policies[item] for item in ("expert_inputs", "expert_activations")} <= {"save", "offload"}
    assert mist.candidate != best.candidate
    assert mist.prediction.seconds.middle > 1.01 * best.prediction.seconds.middle


def test_the_roofline_sees_no_latencies() -> None:
    every, problem = candidates("fastermoe")
    slow = replace(H100, nvlink=LinkRate(150e9, 5e-3), push=None, network=LinkRate(45e9, 5e-3))
    late = replace(problem, hardware=slow)
    soon = replace(H100, nvlink=LinkRate(150e9, 0.0), push=None, network=LinkRate(45e9, 0.0))
    early = replace(problem, hardware=soon)
    assert roofline(every, late.lengths) == roofline(every, early.lengths)
    predicted = [plan(SHAPE, one, **NUMBERS, best=1, space=SMALL).plans[0].candidate for one in (slow, soon)]
    assert predicted[0] != predicted[1]


def test_fsmoe_has_chunks_of_its_own_in_each_pass() -> None:
    wide = Candidate(Degrees(1, 16, 1, 16), 4096, 8, 1, "hierarchical", "chunks")
    one = fsmoe(wide, Lengths(SHAPE, H100, wide, 8))
    assert 1 < one.chunks <= 8 and one.backward_chunks is not None and one.backward_chunks >= one.chunks
    moe = one.settings()["moe"]
    assert (moe["chunks"], moe["backward_chunks"]) == (one.chunks, one.backward_chunks)
    # Where latency is most of a ride, chunks cost more than they hide.
    late = replace(H100, nvlink=LinkRate(150e9, 5e-3), push=None, network=LinkRate(45e9, 5e-3))
    assert fsmoe(wide, Lengths(SHAPE, late, wide, 8)).chunks == 1


def test_tutel_pads_to_the_fullest_expert() -> None:
    every, _ = candidates("tutel")
    rng = np.random.default_rng(0)
    # The first expert is in every choice: with 128 experts, 16 times as full as the mean.
    skewed = np.stack([[0, *(1 + rng.choice(127, 7, replace=False))] for _ in range(512)])
    routes = Routes((skewed,), "skewed")

    def first(routes: Routes) -> Candidate:
        return tutel(every, lambda one: Lengths(SHAPE, H100, one, 8, routes))[0]

    assert first(Routes()) != first(routes)
    # Padded rides are so long that fewer rows, not fewer pieces, count.
    assert {one.transport for one in every} <= {"alltoall", "hierarchical", "local"}


def test_bagualu_spreads_experts_over_all_nodes() -> None:
    one = chosen("bagualu").candidate
    assert one.degrees == Degrees(1, 16, 1, 16) and one.transport == "hierarchical" and one.data_parallel == "zero1"


def test_constraints_are_tried_and_kept() -> None:
    space = read_constraints(Space(), ["optimizer_offload=host,none", "transport=alltoall,dedup,nvlink", "ep=8,2"])
    assert space.optimizer_offload == ("none", "host"), "what fits with the first one is not tried with the second"
    assert space.transports == ("nvlink", "dedup", "alltoall") and space.ep == (8, 2)
    space = read_constraints(Space(), ["ep=2,8", "memory.expert_activations=save", "optimizer_offload=none"])
    space = replace(space, tp=(1,), pp=(1,), cp=(1,), micro_batches=(1, 2))
    one = plan(SHAPE, H100, **NUMBERS, best=1, space=space)
    assert (
        one.plans[0].candidate.degrees.ep in (2, 8) and one.plans[0].candidate.policies["expert_activations"] == "save"
    )
    assert plan(SHAPE, H100, **NUMBERS, best=1, space=space, system=PLANNERS["alpa"]).plans[0].candidate.degrees.ep in (
        2,
        8,
    )
    for given, said in (
        ("eps=8", "expected NAME=VALUES such as ep=8,16"),
        ("ep=few", "ep is a positive number"),
        ("transport=roads", "roads is none of nvlink"),
        ("memory.expert_inputs=recompute", "recompute is none of save, resend, offload"),
    ):
        with pytest.raises(ValueError, match=said):
            read_constraints(Space(), [given])
    spread = read_constraints(SMALL, ["transport=nvlink", "ep=16"])
    nothing = plan(SHAPE, H100, **NUMBERS, space=spread)
    assert not nothing.plans and any("no transport of nvlink joins" in why for why in nothing.refused)
    with pytest.raises(ValueError, match="pp: none of 1 is among what is allowed: 4"):
        PLANNERS["bagualu"].restrict(read_constraints(Space(), ["pp=4"]), SHAPE)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_equal_rides_follow_the_formula(chunks: int) -> None:
    for a, c in itertools.product((0.1, 1.0, 2.0, 7.0), (0.1, 1.0, 3.0, 9.0)):
        formula = max(2 * chunks * a, 2 * a + chunks * c, (chunks + 1) * a + c)
        took = chunked(Pieces(a, c, a), chunks)
        # Between, the links wait once for the first chunk's experts; a third dispatch under way would fill that.
        assert took == pytest.approx(formula) if c <= a or c >= 2 * a else formula <= took <= formula + 2 * (c - a)


def test_chunks_by_hand() -> None:
    pieces = Pieces(1.0, 2.0, 3.0, 4.0)
    assert chunked(pieces, 3, beside=False) == pytest.approx(30.0) == 3 * pieces.alone
    assert chunked(Pieces(1.0, 2.0, 3.0, after=4.0), 1) == 7.0
    assert chunked(Pieces(1.0, 2.0, 3.0, after=1.0), 1) == 6.0
    ready = {r: chunked(Pieces(2 / r, 4 / r, 2 / r, host=0.0), r) for r in (1, 2, 4)}
    slow = {r: chunked(Pieces(2 / r, 4 / r, 2 / r, host=6.0), r) for r in (1, 2, 4)}
    assert min(ready, key=ready.__getitem__) == 4 and min(slow, key=slow.__getitem__) == 1
    assert slow[2] > 12.0


GPU = HARDWARE["H100"]
# Qwen3-30B-A3B on four ranks.
BUDGETED, CANDIDATE = shape("qwen3-30b-a3b"), Candidate(Degrees(fsdp=4, ep=4), 4096, 2, 3)
TOKENS = CANDIDATE.micro_tokens
OPEN = dict.fromkeys(POLICIES)
KEEP = dict.fromkeys(POLICIES, "save")
COSTS = modelled_milliseconds(BUDGETED, GPU, CANDIDATE, 4)


@cache
def _total(*policies: str) -> int:
    one = replace(CANDIDATE, policies=dict(zip(POLICIES, policies, strict=True)))
    return int(memory_of(BUDGETED, one).parts["activations"])


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
        return 1e3 * predict(BUDGETED, GPU, replace(one, policies=KEEP | policies), 4).seconds.middle

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
        modelled_milliseconds(BUDGETED, replace(GPU, host=LinkRate(rate, 0.0)), CANDIDATE, 4)(KEEP | away)
        for rate in (1e15, 1e9, 0.5e9)
    )
    size = TOKENS * (8 * 2 * 768 * 2 + 4 * (1 - (3 / 4) ** 8) * 2048 * 2)
    # A copy for each of 48 layers out and back, of which little hides; a link of half the rate takes as much again.
    assert slower - slow == pytest.approx(1e3 * 2 * 48 * size / 1e9, rel=0.05)
    assert 0 <= fast < 0.05 * slow
