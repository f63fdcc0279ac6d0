"""The router's kernels in Triton's interpreter, on the CPU, against plain PyTorch in float64.

tests/conftest.py chooses the interpreter where there is no GPU.
Few programs and small tiles, so that loops run several times; PyTorch fills memory that nobody initialised with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from unittest import mock

import pytest
import torch

from carpool import Router
from carpool.routing import Rule, route
from carpool.routing import kernel as routing_kernel
from carpool.routing import logits as routing_logits
from carpool.routing import router as routing
from tests.routing_problem import CASES, Case, check, check_not_finite


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """A program takes several tiles; large batches get larger ones, for the interpreter's sake."""

    def tiling(tokens: int, width: int) -> tuple[int, int]:
        rows = 16 if tokens < 100 else 128
        return rows, min(-(-tokens // rows), 2)

    with mock.patch.object(routing_kernel, "tiling", tiling):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_equal_plain_pytorch(case: Case) -> None:
    check(case, routing_kernel.route, "cpu")


def test_nan_and_infinity() -> None:
    check_not_finite(routing_kernel.route, "cpu")


def test_the_tiles_that_gpus_get() -> None:
    rule = Rule(2, aux_loss_coef=1.0)
    logits_TE = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    few = routing_kernel.route(logits_TE, None, None, rule, ())
    with mock.patch.object(routing_kernel, "tiling", TILING):
        many = routing_kernel.route(logits_TE, None, None, rule, ())
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b)
    assert TILING(37, 64) == (8, 5) and TILING(10**6, 1024) == (1, routing_kernel.PROGRAMS) and TILING(0, 8)[1] == 0


TILING = routing_kernel.tiling


# -- the product ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(37, 40, 7), (5, 16, 64), (0, 8, 3)])
def test_the_products_gradients(tokens: int, hidden: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(experts, hidden, generator=generator).bfloat16().requires_grad_()
    dlogits = torch.randn(tokens, experts, generator=generator)
    got = routing_logits.logits(x, weight)
    want = x.double() @ weight.double().t()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6 * hidden**0.5)
    exact = dlogits.double() @ weight.double(), dlogits.double().t() @ x.double()
    for a, b in zip(torch.autograd.grad(got, (x, weight), dlogits), exact, strict=True):
        # Rounded once, to bfloat16; with one bfloat16 for dlogits it would be as if twice. (The interpreter cuts
        # where a GPU rounds, so its two pieces hold a bit less each.)
        assert a.dtype == torch.bfloat16
        assert ((a.double() - b).abs() <= 2.0**-8 * 1.001 * b.abs() + 2.0**-14 * b.norm()).all()


def test_the_two_pieces() -> None:
    values = torch.randn(50, 21, generator=torch.Generator().manual_seed(0)) * torch.logspace(-25, 30, 21)
    pieces = routing_logits.split(values).double()
    assert ((pieces[:, :21] - values).abs() <= 2.0**-7 * values.abs()).all()
    assert ((pieces[:, :21] + pieces[:, 21:] - values).abs() <= 2.0**-14 * values.abs()).all()


# -- the router, which chooses by device ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replay", [False, True])
def test_the_router_gives_the_same_with_kernels(dtype: torch.dtype, replay: bool) -> None:
    def run(kernels: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        router = Router(
            24, 12, 3, score="sigmoid", num_groups=3, topk_groups=2, scaling_factor=2.5, aux_loss_coef=0.3,
            z_loss_coef=0.1, bias_update_rate=0.1, capacity_factor=0.7, dtype=dtype,
        )  # fmt: skip
        router.weight.data.copy_(torch.randn(12, 24, generator=generator) / 5)
        router.bias_E.copy_(torch.linspace(-0.1, 0.1, 12))
        x = torch.randn(37, 24, generator=generator).to(dtype).requires_grad_()
        expert_TK = torch.rand(37, 12, generator=generator).argsort(1)[:, :2].int() if replay else None
        with mock.patch.object(routing, "on_gpu", lambda _: kernels):
            routed = router(x, expert_TK)
        ((routed.weight_TK * torch.linspace(0, 1, routed.weight_TK.shape[1])).sum() + router.aux_loss).backward()
        slopes = x.grad, router.weight.grad
        return [routed.expert_TK, router.load_E, router.dropped, routed.weight_TK, router.aux_loss, *slopes]

    for n, (got, want) in enumerate(zip(run(True), run(False), strict=True)):
        assert got.dtype == want.dtype
        if n < 3:
            assert torch.equal(got, want), n
        else:
            # A gradient of bfloat16 may be rounded the other way.
            tolerance = 1e-2 if dtype == torch.bfloat16 and n >= 5 else 2e-5
            torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_loss_of_two_ranks_is_that_of_the_whole_batch(score: Literal["softmax", "sigmoid"]) -> None:
    """Only the collective is played: it gives each rank the sum of what both brought."""
    rule = Rule(2, score, aux_loss_coef=0.3, z_loss_coef=0.1)
    logits = torch.randn(37, 7, generator=torch.Generator().manual_seed(0))
    brought: list[torch.Tensor] = []

    def collect(total: torch.Tensor, groups: object) -> int:
        brought.append(total.clone())
        return 1

    def add(total: torch.Tensor, groups: object) -> int:
        total.copy_(sum(brought))
        return 2

    whole = logits.double().requires_grad_()
    want = route(whole, None, None, rule).aux_loss
    (slope,) = torch.autograd.grad(want, whole)
    ranks = [part.clone().requires_grad_() for part in logits.split([30, 7])]
    with mock.patch.object(routing_kernel, "sum_over", collect):
        for part in ranks:
            routing_kernel.route(part, None, None, rule, ())
    with mock.patch.object(routing_kernel, "sum_over", add):
        losses = [routing_kernel.route(part, None, None, rule, ()).aux_loss for part in ranks]
    for loss in losses:
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    got = torch.cat([torch.autograd.grad(loss / 2, part)[0] for loss, part in zip(losses, ranks, strict=True)])
    torch.testing.assert_close(got.double(), slope, rtol=1e-4, atol=1e-8)


def test_weights_alone_and_loss_alone() -> None:
    """Gradients that do not come are not read."""
    rule = Rule(2, "sigmoid", aux_loss_coef=0.3, z_loss_coef=0.1)
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for pick in (lambda r: r.weight_TK[:, 0].sum(), lambda r: r.aux_loss):
        (got,) = torch.autograd.grad(pick(routing_kernel.route(logits, None, None, rule, ())), logits)
        (want,) = torch.autograd.grad(pick(route(logits, None, None, rule)), logits)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
