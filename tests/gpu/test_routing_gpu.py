"""The router's kernels on a GPU, against plain PyTorch in float64 on the CPU. PyTorch fills fresh memory with NaN."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from carpool import Router
from carpool.routing import Rule
from carpool.routing import router as routing
from tests.gpu.ranks import NAN_IN_FRESH_MEMORY
from tests.no_waits import no_waits
from tests.routing_problem import CASES, Case, check, check_not_finite

pytestmark = NAN_IN_FRESH_MEMORY

LARGE = [
    Case(8192, 64, Rule(8, "softmax", aux_loss_coef=0.3, z_loss_coef=0.1)),
    Case(20001, 128, Rule(8, "softmax", normalize=False)),
    Case(5000, 1000, Rule(22, "softmax", aux_loss_coef=0.3)),
    Case(20001, 60, Rule(4, "sigmoid", aux_loss_coef=0.3, z_loss_coef=0.1), values="ties"),
    Case(9999, 256, Rule(8, "sigmoid", True, 2.5, 0, 0, 0.3), given=True),
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_the_kernels_equal_plain_pytorch(case: Case) -> None:
    from carpool.routing.kernel import route

    check(case, route, "cuda")


def test_nan_and_infinity() -> None:
    from carpool.routing.kernel import route

    check_not_finite(route, "cuda")


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"),
    [(8192, 2048, 64), (4096, 7168, 256), (199, 200, 37), (37, 19, 7), (1, 8, 64), (0, 64, 8)],
)
def test_logits_and_their_gradients_are_rounded_once(tokens: int, hidden: int, experts: int) -> None:
    from carpool.routing.logits import logits

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(experts, hidden, generator=generator, device="cuda").bfloat16().requires_grad_()
    dlogits = torch.randn(tokens, experts, generator=generator, device="cuda")
    got = logits(x, weight)
    wide = x.double() @ weight.double().t(), dlogits.double() @ weight.double(), dlogits.double().t() @ x.double()
    rounding = (0.0, 2.0**-8, 2.0**-8)
    for a, b, u in zip((got, *torch.autograd.grad(got, (x, weight), dlogits)), wide, rounding, strict=True):
        assert a.dtype == (torch.bfloat16 if u else torch.float32)
        if b.numel():
            allowed = 1.001 * u * b.abs() + 2.0**-15 * b.abs().max()
            assert ((a.double() - b).abs() <= allowed).all(), float((a.double() - b).abs().max() / b.abs().max())


def steps(router: Router, x_TH: torch.Tensor, recording: torch.Tensor | None) -> list[torch.Tensor]:
    x_TH = x_TH.detach().requires_grad_()
    routed = router(x_TH, recording)
    assert routed.weight_TK is not None
    loss = (routed.weight_TK * torch.linspace(0, 1, routed.weight_TK.shape[1], device="cuda")).sum() + router.aux_loss
    slopes = torch.autograd.grad(loss, (x_TH, router.weight))
    return [routed.expert_TK, router.load_E.clone(), routed.weight_TK, router.aux_loss, *slopes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replay", [False, True])
def test_a_router_waits_for_nothing_and_repeats_itself(dtype: torch.dtype, replay: bool) -> None:
    torch.manual_seed(0)
    options = {"aux_loss_coef": 0.3, "z_loss_coef": 0.1, "bias_update_rate": 0.1, "scaling_factor": 2.5}
    router = Router(256, 64, 8, score="sigmoid", num_groups=8, topk_groups=3, device="cuda", dtype=dtype, **options)
    router.weight.data.normal_(std=1 / 16)
    x = torch.randn(1003, 256, device="cuda", dtype=dtype)
    recording = torch.rand(1003, 64, device="cuda").argsort(1)[:, :5].int() if replay else None
    first = steps(router, x, recording)
    router.reset_counts()
    with no_waits():
        second = steps(router, x, recording)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # The same numbers in plain PyTorch on the same GPU; a few near-ties may be decided otherwise.
    router.reset_counts()
    with mock.patch.object(routing, "on_gpu", lambda _: False):
        plain = steps(router, x, recording)
    same = (first[0] == plain[0]).all(1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(first[2][same], plain[2][same], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first[3], plain[3], rtol=1e-4, atol=1e-5)
    scale = plain[4].abs().max()
    torch.testing.assert_close(first[4][same] / scale, plain[4][same] / scale, rtol=1e-2, atol=1e-4)
