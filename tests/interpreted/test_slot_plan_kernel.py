"""The kernels of a plan of spare slots in Triton's interpreter: equal to plain PyTorch, which defines them.

tests/conftest.py chooses the interpreter where there is no GPU.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from carpool.replicas import slot_plan, slot_plan_kernel
from carpool.replicas.slot_plan import add_counts, count_choices, plan_slots, served_by
from tests.slot_plan_problem import CASES, Case, problem, random_plan

kernels = mock.patch.object(slot_plan, "on_gpu", lambda _: True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_equal_plain_pytorch(case: Case) -> None:
    for seed in (0, 1):
        choices, load_WE, home_E, node_W = problem(case, seed)
        want = plan_slots(load_WE, home_E, case.spare, case.costs, node_W)
        with kernels, mock.patch.object(slot_plan_kernel, "plan", wraps=slot_plan_kernel.plan) as launched:
            plan = plan_slots(load_WE, home_E, case.spare, case.costs, node_W)
        assert launched.called
        for got, defined in zip(plan, want, strict=True):
            assert got.dtype == defined.dtype and torch.equal(got, defined)
        # Each seed looks at another rank: with their slots' own numbers, then with other names.
        rank = (0, case.ranks - 1)[seed]
        names_N = torch.randperm(case.experts + case.ranks * case.spare, dtype=torch.int32) if seed else None
        arguments = choices[rank], load_WE, home_E, want, rank, names_N
        slot_TK = served_by(*arguments)
        with (
            kernels,
            mock.patch.object(slot_plan_kernel, "BLOCK", 128),
            mock.patch.object(slot_plan_kernel, "CHUNK", 2),
            mock.patch.object(slot_plan_kernel, "serve", wraps=slot_plan_kernel.serve) as launched,
        ):
            got = served_by(*arguments)
        assert launched.called
        assert got.dtype == slot_TK.dtype == torch.int32 and torch.equal(got, slot_TK)
        # A limit that the plan keeps, one that it does not, and none.
        for limit in (1100, 1, 0):
            counts, counted = torch.full((7,), 3), torch.full((7,), 3)
            add_counts(counts, load_WE, home_E, want, rank, limit)
            with kernels, mock.patch.object(slot_plan_kernel, "add_counts", wraps=slot_plan_kernel.add_counts) as ran:
                add_counts(counted, load_WE, home_E, want, rank, limit)
            assert ran.called and torch.equal(counted, counts)


@pytest.mark.parametrize("first", [0, 40])
def test_random_plans_are_equal(first: int) -> None:
    for seed in range(first, first + 40):
        arguments = random_plan(seed)
        want = plan_slots(*arguments)
        with kernels:
            assert all(map(torch.equal, plan_slots(*arguments), want)), arguments


def test_choices_are_counted() -> None:
    choices, load_WE, *_ = problem(CASES[4])
    for expert_TK, load_E in zip(choices, load_WE, strict=True):
        with kernels:
            counted_E = count_choices(expert_TK, load_WE.shape[1])
        for got in (counted_E, count_choices(expert_TK, load_WE.shape[1])):
            assert got.dtype == torch.int32 and torch.equal(got, load_E)


@pytest.mark.parametrize(
    ("ranks", "experts", "spare", "top_k", "fits"),
    [
        (8, 512, 4, 8, True), (64, 512, 8, 64, True), (65, 512, 1, 8, False), (2, 2048, 1, 8, False),
        (8, 64, 513, 8, False), (8, 64, 4, 65, False), (8, 64, 4, 0, False),
    ],
)  # fmt: skip
def test_pytorch_does_what_does_not_fit(ranks: int, experts: int, spare: int, top_k: int, fits: bool) -> None:
    assert slot_plan_kernel.fits(torch.Size((ranks, experts)), spare, top_k) is fits


@pytest.mark.parametrize("why", ["torch.compile", "size"])
def test_and_what_is_compiled(why: str) -> None:
    case = CASES[3]
    choices, load_WE, home_E, _ = problem(case)
    want = plan_slots(load_WE, home_E, case.spare, case.costs)
    slot_TK = served_by(choices[0], load_WE, home_E, want, 0)
    other = (
        mock.patch("torch.compiler.is_compiling", lambda: True)
        if why == "torch.compile"
        else mock.patch.object(slot_plan_kernel, "LARGEST_TABLE", 32)
    )
    broken = {"plan": mock.Mock(side_effect=AssertionError), "serve": mock.Mock(side_effect=AssertionError)}
    with kernels, other, mock.patch.multiple(slot_plan_kernel, **broken):
        assert all(map(torch.equal, plan_slots(load_WE, home_E, case.spare, case.costs), want))
        assert torch.equal(served_by(choices[0], load_WE, home_E, want, 0), slot_TK)
