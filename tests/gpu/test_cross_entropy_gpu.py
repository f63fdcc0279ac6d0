"""The cross-entropy of a linear layer on a GPU, against float64 on the CPU, its memory and its host."""

from __future__ import annotations

import pytest
import torch

from carpool.kernels.cross_entropy import linear_cross_entropy
from tests.cross_entropy_problem import CASES, Case, check
from tests.no_waits import no_waits

pytestmark = pytest.mark.gpu

LARGE = [Case(1003, 256, 50_257, None, torch.bfloat16, ignored=0.1), Case(512, 128, 151_936, 100, torch.bfloat16)]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_loss_and_gradients_are_those_of_float64(case: Case) -> None:
    check(case, "cuda")


def test_a_label_that_is_no_word_is_noticed() -> None:
    x, weight = torch.randn(4, 8, device="cuda"), torch.randn(16, 8, device="cuda")
    assert linear_cross_entropy(x, weight, None, torch.tensor([1, 2, 16, 3], device="cuda")).isnan()


def test_logits_are_never_whole_and_the_host_never_waits() -> None:
    tokens, hidden, words = 8192, 256, 151_936
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(words, (tokens,), device="cuda")
    linear_cross_entropy(x, weight, None, target).backward()
    first = weight.grad
    weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waits():
        linear_cross_entropy(x, weight, None, target).backward()
    # One chunk of logits in bfloat16, and the weight's gradient in float32 and in bfloat16.
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * 2**30 + 8 * words * hidden
    assert first is not None and weight.grad is not None and torch.equal(first, weight.grad)
