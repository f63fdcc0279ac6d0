"""The kernel that dequantises experts' matrices, in Triton's interpreter, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool.experts import GroupedExperts, make_activation
from carpool.experts.gemm.choices import Choices
from carpool.experts.quantised import Kind, dequantise, quantise
from tests.experts_problem import ACTIVATIONS, ExpertProblem
from tests.interpreted.test_experts import kernels, nan_in_fresh_memory  # noqa: F401


@pytest.mark.parametrize(
    ("kind", "rows", "width"),
    [("nf4", 37, 192), ("nf4", 3, 64), ("nf4", 130, 320), ("mxfp4", 7, 96), ("int8", 130, 320), ("int8", 5, 37)],
)
def test_the_kernel_makes_the_same_bits(kind: Kind, rows: int, width: int) -> None:
    one = quantise(torch.randn(4, rows, width, generator=torch.Generator().manual_seed(0)), kind)
    for dtype in (torch.float32, torch.float16):
        want = dequantise(*one, dtype)
        with kernels():
            got = dequantise(*one, dtype)
            some = dequantise(*one, dtype, torch.tensor([0, 3, 3, 5], dtype=torch.int32))
            part = dequantise(*one, dtype, rows=slice(1, 3))
        assert torch.equal(got, want)
        assert torch.equal(part, want[:, 1:3]) and torch.equal(dequantise(*one, dtype, rows=slice(1, 3)), part)
        # Experts without rows are left out.
        assert torch.equal(some[[1, 3]], want[[1, 3]]) and some[[0, 2]].isnan().all()


@pytest.mark.parametrize(("kind", "pattern"), [("nf4", "idle slots"), ("int8", "random"), ("nf4", "no pairs")])
def test_experts_on_a_quantised_base(kind: Kind, pattern: str) -> None:
    hidden, inner = (64, 128) if kind == "nf4" else (37, 19)
    problem = ExpertProblem(
        pattern, hidden, inner, make_activation("silu", True), True, torch.float32, ranks=(3, 8), frozen=True
    )
    twin = problem.quantise(kind)
    with kernels():
        got = problem.run(GroupedExperts(problem.function), use_arena=True, all_rows=False)
    twin.check(got, 5e-6, all_rows=False)


@pytest.mark.parametrize("name", ["SwiGLU", "gpt-oss"])
def test_some_experts_at_a_time_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases and adapters; four parts, of which the last is smaller. No more than a part is ever there."""
    problem = ExpertProblem(
        "idle slots", 64, 128, ACTIVATIONS[name], True, torch.float32, ranks=(3, 8), frozen=True, transposed=True
    )
    problem.quantise("nf4")
    experts = GroupedExperts(problem.function, Choices.all("square"))
    with kernels():
        whole = problem.run(experts, use_arena=True, all_rows=False)
        one = max(weight[0].numel() for weight in problem.weights[:2])
        monkeypatch.setattr("carpool.experts.gemm.grouped_products.AT_ONCE", 2 * one)
        made = []

        def counted(code: torch.Tensor, *rest: Any, **settings: Any) -> torch.Tensor:
            made.append(dequantise(code, *rest, **settings))
            return made[-1]

        monkeypatch.setattr("carpool.experts.gemm.grouped_products.dequantise", counted)
        parts = problem.run(experts, use_arena=True, all_rows=False)
    slots = len(problem.weights.up_SFH)
    assert slots % 2 and len(made) == 4 * -(-slots // 2) and max(t.numel() for t in made) <= 2 * one
    # In each product the parts are in the same memory.
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) <= 4
    for key, want in whole.items():
        assert torch.equal(parts[key].nan_to_num(7), want.nan_to_num(7)), key
