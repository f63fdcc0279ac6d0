"""Routing problems, and the check that kernels solve them as plain PyTorch does in float64. Shared by the tests in the
interpreter and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from carpool.routing import Routed, Rule, route


class Case(NamedTuple):
    """One problem.

    Attributes:
        values: "random"; "ties": whole numbers, so that many logits are equal; "infinite": ties, some -inf.
        given: the choices are a recording, with holes.
    """

    tokens: int
    experts: int
    rule: Rule
    bias: bool = False
    values: str = "random"
    given: bool = False

    def __str__(self) -> str:
        fields = [f"T{self.tokens}", f"E{self.experts}", f"K{self.rule.top_k}", self.rule.score, self.values]
        fields += [f"{self.rule.num_groups}x{self.rule.topk_groups}"] if self.rule.num_groups else []
        fields += ["bias"] * self.bias + ["given"] * self.given + ["plain sum"] * (not self.rule.normalize)
        return " ".join(fields)


CASES = [
    Case(37, 7, Rule(2, "softmax", aux_loss_coef=0.3, z_loss_coef=0.1)),
    Case(37, 37, Rule(8, "sigmoid", scaling_factor=2.5, aux_loss_coef=0.3, z_loss_coef=0.1), bias=True),
    Case(1000, 64, Rule(8, "softmax", normalize=False, aux_loss_coef=0.3)),
    Case(1000, 37, Rule(2, "sigmoid", normalize=False, z_loss_coef=0.1)),
    Case(37, 199, Rule(8, "softmax", scaling_factor=0.5, aux_loss_coef=0.3, z_loss_coef=0.1), bias=True),
    Case(1, 256, Rule(8, "sigmoid", True, 2.5, 8, 4, 0.3, 0.1), bias=True),
    Case(70, 256, Rule(8, "sigmoid", True, 2.5, 8, 4, 0.3, 0.1), bias=True),
    Case(37, 512, Rule(32, "softmax")),
    Case(37, 1, Rule(1, "softmax", aux_loss_coef=0.3, z_loss_coef=0.1)),
    Case(37, 7, Rule(1, "sigmoid", normalize=False)),
    Case(37, 7, Rule(7, "softmax", aux_loss_coef=0.3, z_loss_coef=0.1)),
    Case(0, 64, Rule(8, "softmax", aux_loss_coef=0.3, z_loss_coef=0.1)),
    Case(0, 7, Rule(2, "sigmoid")),
    Case(37, 12, Rule(3, "softmax", num_groups=3, topk_groups=2, aux_loss_coef=0.3)),
    Case(37, 30, Rule(4, "sigmoid", num_groups=5, topk_groups=1), bias=True),
    Case(37, 12, Rule(5, "sigmoid", num_groups=12, topk_groups=5)),
    Case(37, 12, Rule(3, "softmax", num_groups=2, topk_groups=2)),
    Case(37, 37, Rule(8, "softmax", aux_loss_coef=0.3), values="ties"),
    Case(37, 64, Rule(8, "sigmoid"), values="ties", bias=True),
    Case(37, 60, Rule(8, "sigmoid", num_groups=6, topk_groups=3), values="ties"),
    Case(37, 37, Rule(8, "softmax", aux_loss_coef=0.3), values="infinite"),
    Case(37, 37, Rule(8, "sigmoid", num_groups=1, topk_groups=1, aux_loss_coef=0.3), values="infinite"),
    Case(37, 37, Rule(3, "softmax", True, 2.5, 0, 0, 0.3, 0.1), given=True),
    Case(1000, 12, Rule(5, "sigmoid", False, 1.0, 3, 2, 0.3), given=True),
]

Implementation = Callable[..., Routed]


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(logits_TE float32, bias_E, expert_TK)."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = 2 * torch.randn(case.tokens, case.experts, generator=generator)
    if case.values != "random":
        logits_TE = logits_TE.round()
    if case.values == "infinite":
        logits_TE[torch.rand(logits_TE.shape, generator=generator) < 0.9] = -torch.inf
        logits_TE[:, case.experts // 2] = -1.0
    bias_E = 0.1 * torch.randn(case.experts, generator=generator) if case.bias else None
    if bias_E is not None and case.values == "ties":
        bias_E = 0.5 * (10 * bias_E).round()
    if not case.given:
        return logits_TE, bias_E, None
    expert_TK = torch.rand(logits_TE.shape, generator=generator).argsort(1)[:, : case.rule.top_k].int()
    expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.2] = -1
    expert_TK[:1] = -1
    return logits_TE, bias_E, expert_TK


def solve(
    case: Case, compute: Implementation, device: str, dtype: torch.dtype
) -> tuple[Routed, torch.Tensor, torch.Tensor | None]:
    """What becomes of the logits, the gradient of all of it at once, and that of the losses alone if there are any."""
    logits_TE, bias_E, expert_TK = draw(case)
    logits_TE = logits_TE.to(device, dtype).requires_grad_()
    bias_E = None if bias_E is None else bias_E.to(device)
    routed = compute(logits_TE, bias_E, None if expert_TK is None else expert_TK.to(device), case.rule, ())
    generator = torch.Generator().manual_seed(1)
    # More tokens than one would weigh the losses' gradients down to nothing beside the others.
    projection_TK = torch.randn(routed.weight_TK.shape, generator=generator).to(device, dtype)
    loss = (routed.weight_TK * projection_TK).sum()
    of_losses = None
    if routed.aux_loss.requires_grad:
        loss = loss + 3 * case.tokens * routed.aux_loss
        (of_losses,) = torch.autograd.grad(routed.aux_loss, logits_TE, retain_graph=True)
    (slope,) = torch.autograd.grad(loss, logits_TE)
    return routed, slope, of_losses


def close(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Within so much of the largest value, nothing more: sums of cancelling terms lose digits wherever they are."""
    assert got.shape == want.shape, what
    if got.numel():
        error = float((got.detach().cpu().double() - want.detach().double()).abs().max())
        scale = max(1e-30, float(want.detach().abs().max()))
        assert error <= tolerance * scale, f"{what}: error {error / scale:.1e}, allowed {tolerance:.0e}"


def check(case: Case, compute: Implementation, device: str) -> None:
    """Choices equal, all else as near as float32 allows, and on a GPU, where programs race, the same bits twice."""
    want, want_slope, want_of_losses = solve(case, route, "cpu", torch.float64)
    got, slope, of_losses = solve(case, compute, device, torch.float32)
    assert got.expert_TK.dtype == torch.int32 and got.weight_TK.dtype == slope.dtype == torch.float32
    assert got.count_E.dtype == torch.int64 and torch.equal(got.count_E.cpu(), want.count_E)
    assert torch.equal(got.expert_TK.cpu(), want.expert_TK)
    close(got.weight_TK, want.weight_TK, "weights")
    close(got.aux_loss, want.aux_loss, "loss")
    close(slope, want_slope, "gradient")
    assert (of_losses is None) == (want_of_losses is None)
    if of_losses is not None and want_of_losses is not None:
        close(of_losses, want_of_losses, "gradient of the losses")
    if device == "cuda":
        again, slope_again, _ = solve(case, compute, device, torch.float32)
        assert torch.equal(slope, slope_again)
        for name, a, b in zip(Routed._fields, got, again, strict=True):
            assert torch.equal(a, b), name


def check_not_finite(compute: Implementation, device: str) -> None:
    """What is no number is above all numbers, and spoils the token that it is of, alone."""
    nan, inf = torch.nan, torch.inf
    rows = [[0.5, nan, 1.0, nan, 0.0], [-inf] * 5, [nan] * 5, [1.0, inf, 0.0, 2.0, -inf], [1.0, -inf, -inf, -inf, -inf]]
    rows.append([0.1, 0.2, 0.3, 0.4, 0.5])
    for rule in (
        Rule(3),
        Rule(3, "sigmoid"),
        Rule(2, "sigmoid", num_groups=5, topk_groups=4),
        Rule(2, normalize=False),
    ):
        for bias_E in (None, torch.zeros(5)):
            want = route(torch.tensor(rows), bias_E, None, rule)
            bias_E = None if bias_E is None else bias_E.to(device)
            got = compute(torch.tensor(rows, device=device), bias_E, None, rule, ())
            assert torch.equal(got.expert_TK.cpu(), want.expert_TK), rule
            torch.testing.assert_close(got.weight_TK.cpu(), want.weight_TK, equal_nan=True)
            assert got.weight_TK[-1].isfinite().all() and torch.equal(got.count_E.cpu(), want.count_E)
        rule = rule._replace(aux_loss_coef=1.0, z_loss_coef=1.0)
        assert not compute(torch.tensor(rows, device=device), None, None, rule, ()).aux_loss.isfinite()
