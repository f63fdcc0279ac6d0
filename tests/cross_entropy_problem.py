"""Cases of the cross-entropy of a linear layer, and what it is in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from carpool.kernels.cross_entropy import IGNORED, linear_cross_entropy


class Case(NamedTuple):
    tokens: int
    hidden: int
    vocabulary: int
    at_once: int | None
    dtype: torch.dtype = torch.float32
    bias: bool = False
    ignored: float = 0.0
    """Share of the tokens without a target."""
    scale: float = 1.0
    softcap: float | None = None


CASES = [
    Case(37, 19, 199, None),
    Case(37, 19, 199, 5, ignored=0.3),
    Case(64, 32, 1024, 16, bias=True),
    Case(33, 16, 515, 8, torch.bfloat16, bias=True, ignored=0.5),
    Case(33, 16, 515, 8, torch.float16),
    Case(24, 8, 20011, 7, ignored=0.2),
    Case(5, 8, 7, 2, ignored=1.0),
    Case(1, 4, 1, None),
    Case(0, 4, 9, None),
    Case(37, 19, 199, 5, scale=0.3, ignored=0.3),
    Case(33, 16, 515, 8, bias=True, softcap=3.0),
    Case(33, 16, 515, 8, torch.bfloat16, scale=0.5, softcap=4.0),
]


def check(case: Case, device: str) -> None:
    """Loss and all gradients against float64, to the rounding of the dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.dtype)
    weight = torch.randn(case.vocabulary, case.hidden, generator=generator).to(case.dtype)
    bias = torch.randn(case.vocabulary, generator=generator).to(case.dtype) if case.bias else None
    target = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    target[torch.rand(case.tokens, generator=generator) < case.ignored] = IGNORED
    given = [t.to(device).requires_grad_() for t in (x, weight, bias) if t is not None]
    settings = (given[2] if case.bias else None, target.to(device), case.at_once, case.scale, case.softcap)
    loss = linear_cross_entropy(*given[:2], *settings)
    found = torch.autograd.grad(loss * 3, given)
    exact = [t.detach().cpu().double().requires_grad_() for t in given]
    single = [t.detach().cpu().float().requires_grad_() for t in given]
    logits, expected = _plain(case, exact, target)
    _, rounded = _plain(case, single, target)
    assert loss.dtype == torch.float32
    with torch.no_grad():
        again = linear_cross_entropy(*given[:2], *settings)
    assert torch.equal(again, loss)
    unit = torch.finfo(case.dtype).eps
    # Logits are rounded to the dtype, so each token's loss is off by that much of its largest logit.
    scale = float(logits.detach().abs().max()) if case.tokens else 0.0
    assert abs(float(loss.detach()) - float(expected.detach())) <= 4 * unit * scale * max(1, case.tokens) + 1e-6
    theirs = torch.autograd.grad(rounded * 3, single)
    for a, b, plain, t in zip(found, torch.autograd.grad(expected * 3, exact), theirs, given, strict=True):
        assert a.dtype == t.dtype and a.shape == t.shape
        # Some libraries add up 20,011 logits one by one; so does plain PyTorch then.
        bound = float(b.abs().max()) * 20 * unit + 2 * float((plain - b).abs().max()) if b.numel() else 0
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=bound)


def _plain(case: Case, given: list[torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss in plain PyTorch."""
    logits = F.linear(*given) * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    return logits, F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
