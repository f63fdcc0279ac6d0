"""The loss of a student that learns from a teacher's probabilities, in chunks of tokens, against plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from carpool.kernels.cross_entropy import IGNORED, linear_cross_entropy
from carpool.kernels.distillation import Distillation, LogProbs

T, H, V = 23, 9, 41


class Case(NamedTuple):
    k: int | None = None
    weight: float = 0.7
    temperature: float = 1.0
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype = torch.float64


CASES = [
    Case(),
    Case(k=7),
    Case(k=7, temperature=2.0),
    Case(k=V, temperature=0.5, weight=1.0),
    Case(k=5, temperature=3.0, bias=True, softcap=2.0, scale=0.8),
    Case(bias=True, softcap=2.0, temperature=1.5),
    Case(k=7, weight=0.0),
    Case(k=7, bias=True, dtype=torch.float32),
    Case(k=7, temperature=2.0, dtype=torch.bfloat16),
]


def teacher_log_probs(case: Case, logits_TV: torch.Tensor) -> LogProbs:
    log_p_TV = torch.log_softmax(logits_TV / case.temperature, 1)
    if case.k is None:
        return LogProbs(log_p_TV)
    log_p_TK, ids_TK = log_p_TV.topk(case.k)
    if case.k < V:
        log_p_TK[0, -1] = -torch.inf  # a token that the teacher gives the probability 0
    return LogProbs(log_p_TK, ids_TK.int())


def plain(
    case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target, log_probs
) -> torch.Tensor:
    """The three sums that the module's docstring defines."""
    logits = F.linear(x, weight, bias) * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    ce = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
    q, p = torch.softmax(logits / case.temperature, 1), log_probs.log_p_CK.to(x.dtype).exp()
    if log_probs.ids_CK is not None:
        ids = log_probs.ids_CK.long()
        others = torch.ones_like(q).scatter(1, ids, 0.0)
        kept, left = q.gather(1, ids), (q * others).sum(1, keepdim=True)
        if case.k != V:
            kept, p = torch.cat([kept, left], 1), torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
        q = kept
    kl = (torch.xlogy(p, p) - p * q.log())[target != IGNORED].sum() * case.temperature**2
    return torch.stack([(1 - case.weight) * ce + case.weight * kl, ce, kl])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_and_gradients_are_those_of_autograd(case: Case) -> None:
    check(case, "cpu")


def check(case: Case, device: str) -> None:
    """Sums and all gradients against float64 on the CPU, to the rounding of the dtype."""
    torch.manual_seed(0)
    x, weight = torch.randn(T, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    bias = torch.randn(V, dtype=torch.float64) if case.bias else None
    log_probs = teacher_log_probs(case, torch.randn(T, V, dtype=torch.float64) * 2)
    target = torch.randint(V, (T,))
    target[::5] = IGNORED
    given = [one.to(device, case.dtype).requires_grad_() for one in (x, weight, bias) if one is not None]
    exact = [one.detach().cpu().double().requires_grad_() for one in given]
    log_p, ids = (None if one is None else one.to(device) for one in log_probs)
    third = given[2] if case.bias else None

    def teacher(chunk: slice) -> LogProbs:
        return LogProbs(log_p[chunk], None if ids is None else ids[chunk])

    losses = Distillation(teacher, case.weight, case.temperature)
    of_logits = (5, case.scale, case.softcap)
    found = linear_cross_entropy(*given[:2], third, target.to(device), *of_logits, losses=losses)
    expected = plain(case, *exact[:2], exact[2] if case.bias else None, target, log_probs)
    rough = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[case.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=rough, atol=rough)
    assert expected[2] > 1  # nothing is zero on both sides
    for a, b in zip(torch.autograd.grad(found[0] * 3, given), torch.autograd.grad(expected[0] * 3, exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=rough, atol=rough * float(b.abs().max()))


def test_a_student_that_agrees_learns_nothing_unless_the_teachers_k_probabilities_sum_to_1() -> None:
    x, weight = torch.randn(T, H, dtype=torch.float64, requires_grad=True), torch.randn(V, H, dtype=torch.float64)
    log_p_TK, ids_TK = torch.log_softmax(x.detach() @ weight.t(), 1).topk(6)
    target = torch.randint(V, (T,))
    for log_TK, agrees in ((log_p_TK, True), (log_p_TK.log_softmax(1), False)):
        log_probs = LogProbs(log_TK, ids_TK)
        losses = Distillation(lambda _, log_probs=log_probs: log_probs, 1.0)
        sums = linear_cross_entropy(x, weight, None, target, T, losses=losses)
        slope, found = float(torch.autograd.grad(sums[0], x)[0].abs().max()), float(sums[2].detach())
        assert (slope < 1e-12 and abs(found) < 1e-12) if agrees else (slope > 0.1 and found > 1)
