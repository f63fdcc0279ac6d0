"""The cross-entropy of a linear layer in chunks, on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from carpool.kernels import cross_entropy
from carpool.kernels.cross_entropy import IGNORED, chunk_size, linear_cross_entropy
from tests.cross_entropy_problem import CASES, Case, check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_float64(case: Case) -> None:
    check(case, "cpu")


def test_float64_is_exact() -> None:
    x, weight = torch.randn(23, 9, dtype=torch.float64), torch.randn(41, 9, dtype=torch.float64)
    target = torch.randint(41, (23,))
    x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, None, target, 4)
    expected = F.cross_entropy(x @ weight.t(), target, reduction="sum")
    torch.testing.assert_close(loss, expected)
    found, exact = (torch.autograd.grad(value, (x, weight)) for value in (loss, expected))
    torch.testing.assert_close(found, exact)


def test_under_autocast_the_weights_gradient_is_not_rounded() -> None:
    """Products are of bfloat16 numbers; a float32 weight gets what they are in float32."""
    x, weight = torch.randn(300, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    target = torch.randint(50, (300,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, None, target, 32)
        logits = F.linear(x, weight)
    assert loss.dtype == torch.float32
    (dweight,) = torch.autograd.grad(loss, weight)
    assert dweight.dtype == torch.float32 and not torch.equal(dweight, dweight.bfloat16().float())
    slope = (logits.detach().float().softmax(1) - F.one_hot(target, 50)).bfloat16()
    torch.testing.assert_close(dweight, slope.float().t() @ x.detach().bfloat16().float(), rtol=1e-5, atol=1e-4)


def test_a_frozen_weight_gets_nothing_and_costs_nothing() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    target = torch.tensor([0, 1, 2, IGNORED, 8, 3])
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, None, target), x)
    expected = F.cross_entropy(x @ weight.t(), target, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x)[0])


def test_a_second_backward_is_refused() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = linear_cross_entropy(x, weight, None, torch.arange(6))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_chunk_has_more_logits_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk_size(8192, 151_936) == 2816 and chunk_size(8192, 32_000) == 8192
    assert chunk_size(0, 10) == chunk_size(1, 10) == 1
    seen: list[torch.Size] = []
    own = cross_entropy.cross_entropy_
    monkeypatch.setattr(cross_entropy, "cross_entropy_", lambda x, *rest: seen.append(x.shape) or own(x, *rest))
    monkeypatch.setattr(cross_entropy, "LOGITS", 128 * 50)
    linear_cross_entropy(torch.randn(300, 4), torch.randn(50, 4), None, torch.zeros(300, dtype=torch.int64))
    assert [rows for rows, _ in seen] == [128, 128, 44]
