"""The kernels of a plan of spare slots on a GPU: equal to plain PyTorch there and on the CPU, without waiting for the
device, and captured in a CUDA graph that is replayed with other choices."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from carpool.replicas import slot_plan, slot_plan_kernel
from carpool.replicas.slot_plan import Costs, SlotPlan, add_counts, count_choices, plan_slots, served_by
from tests.no_waits import no_waits
from tests.slot_plan_problem import CASES, Case, SlotPlanProblem, problem, random_plan

pytestmark = pytest.mark.gpu

LARGE = [
    Case(8, 512, 4, 8, tokens=4096, costs=Costs(4, 3000, 1100)),
    Case(8, 512, 4, 8, tokens=4095, skew=None, uneven=True),
    Case(8, 256, 2, 9, tokens=5000, skew=0.5, costs=Costs(4, 100)),
    Case(64, 512, 8, 8, tokens=999, nodes=8, costs=Costs(4, 100)),
    Case(33, 300, 3, 5, tokens=501, uneven=True),
    # More than the kernels take.
    Case(65, 512, 1, 4, tokens=99),
]


def on_cuda(found: SlotPlanProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    node_W = None if found.node_W is None else found.node_W.cuda()
    return found.load_WE.cuda(), found.home_E.cuda(), node_W


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_the_kernels_equal_plain_pytorch(case: Case) -> None:
    found = problem(case)
    (choices, *_), (load_WE, home_E, node_W) = found, on_cuda(found)
    want = plan_slots(found.load_WE, found.home_E, case.spare, case.costs, found.node_W)
    with mock.patch.object(slot_plan, "on_gpu", lambda _: False):
        plain = plan_slots(load_WE, home_E, case.spare, case.costs, node_W)
    expert_TK, names_N = choices[-1].cuda(), torch.randperm(case.experts + case.ranks * case.spare).int()
    arguments = expert_TK, load_WE, home_E, plain, case.ranks - 1
    with mock.patch.object(slot_plan, "on_gpu", lambda _: False):
        plain_TK = served_by(*arguments)
    names = names_N.cuda()
    with no_waits():
        plan = plan_slots(load_WE, home_E, case.spare, case.costs, node_W)
        slot_TK, named_TK = served_by(*arguments), served_by(*arguments, names)
        load_E = count_choices(expert_TK, case.experts)
        counts = load_WE.new_zeros(7, dtype=torch.int64)
        add_counts(counts, load_WE, home_E, plan, case.ranks - 1, 1100)
    for got, other, defined in zip(plan, plain, want, strict=True):
        assert got.dtype == defined.dtype and torch.equal(got, other) and torch.equal(got.cpu(), defined)
    assert slot_TK.dtype == torch.int32 and torch.equal(slot_TK, plain_TK)
    host = choices[-1], found.load_WE, found.home_E, want, case.ranks - 1
    assert torch.equal(slot_TK.cpu(), served_by(*host))
    assert torch.equal(named_TK.cpu(), served_by(*host, names_N))
    assert torch.equal(load_E.cpu(), found.load_WE[-1])
    counted = torch.zeros(7, dtype=torch.int64)
    add_counts(counted, found.load_WE, found.home_E, want, case.ranks - 1, 1100)
    assert torch.equal(counts.cpu(), counted)


def test_random_plans_are_equal() -> None:
    for seed in range(200):
        load_WE, home_E, spare, costs, node_W = random_plan(seed)
        want = plan_slots(load_WE, home_E, spare, costs, node_W)
        got = plan_slots(load_WE.cuda(), home_E.cuda(), spare, costs, None if node_W is None else node_W.cuda())
        assert all(torch.equal(one.cpu(), defined) for one, defined in zip(got, want, strict=True)), seed


@pytest.mark.parametrize("case", [CASES[4], LARGE[0], LARGE[3]], ids=str)
def test_captured_in_a_graph(case: Case) -> None:
    """Plans of the replays differ in how many steps they take."""
    found = problem(case)
    load_WE, home_E, node_W = on_cuda(found)
    expert_TK = found.choices[0].cuda()
    assert slot_plan_kernel.fits(load_WE.shape, case.spare, case.top_k)

    def all_of_it() -> tuple[SlotPlan, torch.Tensor]:
        plan = plan_slots(load_WE, home_E, case.spare, case.costs, node_W)
        return plan, served_by(expert_TK, load_WE, home_E, plan, 0)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        all_of_it()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        plan, slot_TK = all_of_it()
    replicas = set()
    for seed, skew in ((1, 1.2), (2, 0.0), (3, None)):
        other = problem(case._replace(skew=skew), seed)
        load_WE.copy_(other.load_WE)
        expert_TK.copy_(other.choices[0])
        graph.replay()
        want = plan_slots(other.load_WE, other.home_E, case.spare, case.costs, other.node_W)
        assert all(torch.equal(got.cpu(), defined) for got, defined in zip(plan, want, strict=True))
        assert torch.equal(slot_TK.cpu(), served_by(other.choices[0], other.load_WE, other.home_E, want, 0))
        replicas.add(int((want.expert_WS >= 0).sum()))
    assert len(replicas) > 1
