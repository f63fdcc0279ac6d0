"""`training.full_determinism`."""

from __future__ import annotations

import pytest
import torch

from carpool.train.steps.diagnose import determinism


@pytest.mark.parametrize("on", [False, True])
def test_it_holds_inside_and_ends_with_errors_too(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or it stays, as a GPU's process needs it
    with pytest.raises(KeyError), determinism(on):
        assert torch.are_deterministic_algorithms_enabled() == on
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.gpu
def test_the_backward_of_fused_attention_repeats() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", requires_grad=True) for _ in range(3))
    with determinism(True):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        first, *others = (torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
