"""The kernel of `assign` in Triton's interpreter: equal to plain PyTorch, which defines it.

tests/conftest.py chooses the interpreter where there is no GPU.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from carpool import ExpertLayout, Routing, assign
from carpool.layout import expert_layout as layout_module
from carpool.replicas import slots
from carpool.replicas.slots import SlotFiller
from tests.assign_problem import CASES, Case, problem

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True)

from carpool.layout import assign_kernel


def few_programs(tokens: int, width: int) -> tuple[int, int]:
    return 16, 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_plain_pytorch(case: Case) -> None:
    with mock.patch.object(assign_kernel, "tiling", few_programs):
        for seed in (0, 1):
            expert_TK, *rest = problem(case, seed)
            want = assign(Routing(expert_TK, None, rest[2]), *rest[:2])
            got = assign_kernel.assign(expert_TK, *rest)
            assert got.dtype == want.dtype == torch.int32 and torch.equal(got, want)
            assert case.tokens < 30 or len(want.unique()) > 2


def test_rounds_are_counted() -> None:
    """A token that names experts twice could use more rounds than PyTorch's version takes."""
    layout = ExpertLayout(((0, 1), (2,), (3,), (4,), (5,))).with_replicas([(0, 2), (1, 2), (2, 3)])
    expert_TK = torch.tensor([[0, 0, 1, 1, 2, 2]] * 16, dtype=torch.int32)
    assert layout.shared_rounds(6) == 1
    want = assign(Routing(expert_TK, None), layout, 4)
    assert torch.equal(assign_kernel.assign(expert_TK, layout, 4), want)
    with mock.patch.object(ExpertLayout, "shared_rounds", lambda *_: 2):
        assert not torch.equal(assign(Routing(expert_TK, None), layout, 4), want)


def test_the_tiles_that_gpus_get() -> None:
    case = CASES[4]
    expert_TK, *rest = problem(case)
    assert assign_kernel.tiling(37, 8 * 4) == (16, 1) and assign_kernel.tiling(37, 16 * 64) == (1, 1)
    assert torch.equal(assign_kernel.assign(expert_TK, *rest), assign(Routing(expert_TK, None, rest[2]), *rest[:2]))


def test_any_memory_layout() -> None:
    """Choices and ranks may be slices, and ranks the same for all tokens without being written out."""
    expert_TK, layout, source, serving_TW = problem(CASES[5])
    assert serving_TW is not None
    wide_TK = torch.full((len(expert_TK), 20), 7, dtype=torch.int32)
    wide_TK[:, 3:11] = expert_TK
    for serves_TW in (serving_TW.t().contiguous().t(), serving_TW[:1].expand(len(expert_TK), -1)):
        want = assign(Routing(expert_TK, None, serves_TW), layout, source)
        assert torch.equal(assign_kernel.assign(wide_TK[:, 3:11], layout, source, serves_TW), want)


@pytest.mark.parametrize(("top_k", "ranks", "kernel"), [(8, 4, 1), (16, 63, 1), (65, 4, 0), (16, 300, 0), (0, 4, 0)])
def test_assign_chooses_by_device_and_size(top_k: int, ranks: int, kernel: int) -> None:
    expert_TK, layout, *_ = problem(Case(max(top_k, ranks, 64), ranks, 3 * ranks, max(top_k, 1), tokens=3))
    routing = Routing(expert_TK[:, :top_k], None)
    want = assign(routing, layout, 1)
    with (
        mock.patch.object(layout_module, "on_gpu", lambda _: True),
        mock.patch.object(assign_kernel, "assign", wraps=assign_kernel.assign) as called,
    ):
        assert torch.equal(assign(routing, layout, 1), want)
    assert called.call_count == kernel


def test_under_torch_compile_it_is_pytorch() -> None:
    expert_TK, layout, source, serving_TW = problem(CASES[5])

    def choose(expert_TK: torch.Tensor) -> torch.Tensor:
        return assign(Routing(expert_TK, None, serving_TW), layout, source)

    want = choose(expert_TK)
    with (
        mock.patch.object(layout_module, "on_gpu", lambda _: True),
        mock.patch.object(assign_kernel, "assign", side_effect=AssertionError),
    ):
        assert torch.equal(torch.compile(choose, backend="eager", fullgraph=True)(expert_TK), want)


def test_what_slots_serve_is_counted() -> None:
    for case in (CASES[4], CASES[3], CASES[0]._replace(tokens=300)):
        expert_TK, layout, *_ = problem(case)
        fillers = SlotFiller(layout, None), SlotFiller(layout, None)
        for source in (0, 1):
            slot_TK = assign(Routing(expert_TK, None), layout, source)
            fillers[0].count(slot_TK)
            with mock.patch.object(slots, "on_gpu", lambda _: True):
                fillers[1].count(slot_TK)
        want, got = (filler.load_P for filler in fillers)
        assert want is not None and got is not None and torch.equal(got, want)
        assert want.sum() == 2 * expert_TK.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_replicas_are_added_alike(dtype: torch.dtype) -> None:
    """Expert 0 has four summands, on all ranks; 1 and 2 have two, and 2 none of them at home."""
    layout = ExpertLayout(((0, 2, 1), (3,), (4,), (5,)), ((0, 1), (3, 2, 0), (1, 0, 4), (2, 5, 0)))
    generator = torch.Generator().manual_seed(0)
    filler = SlotFiller(layout, None)
    back = torch.randn(sum(filler.send), 3, 7, generator=generator).to(dtype)
    own = torch.randn(2, 3, 7, generator=generator).to(dtype)
    want = filler.add_up(back, own)
    # In order of (rank, slot): rank 1 sends those of 2 and 0, rank 2 of 1 and 0, rank 3 of 2 and 0.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    from_1, from_2, from_3 = back.to(wide).split(2)
    own_0, own_1 = own.to(wide)
    rows = own_0 + from_1[1] + from_2[1] + from_3[1], from_1[0] + from_3[0], own_1 + from_2[0]
    assert torch.equal(want, torch.stack(rows).to(dtype))
    with mock.patch.object(slots, "on_gpu", lambda _: True):
        assert torch.equal(filler.add_up(back, own), want)
