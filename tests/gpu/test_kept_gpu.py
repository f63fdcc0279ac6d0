"""On a GPU: every policy of what rides keep gives the same bits over nvlink, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool import ActivationPolicies
from carpool.activations import Offloader
from carpool.activations.whole_layers import ActivationOffload
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.metrics.counters import LayerStats
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport.nvlink import NVLink, NVLinkOptions

pytestmark = pytest.mark.gpu
TOKENS, H, F, SLOTS, K, LAYERS = 4096, 1024, 512, 16, 4, 6


def train(transport: NVLink, policies: ActivationPolicies, offloader: Offloader) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").mul_(0.05).bfloat16().requires_grad_()

    experts = GroupedExperts(
        ExpertFunction(make_activation("silu", True)), recompute=policies.expert_activations == "recompute"
    )
    setup = RideSetup(transport, experts, LayerStats(SLOTS, 1, 0), policies=policies, offloader=offloader)
    x, up, down = draw(TOKENS, H), draw(SLOTS, 2 * F, H), draw(SLOTS, H, F)
    y: Any = x
    for _ in range(LAYERS):
        slot = torch.rand(TOKENS, SLOTS, generator=generator, device="cuda").argsort(1)[:, :K].int()
        weight = torch.rand(TOKENS, K, generator=generator, device="cuda")
        y = y + ride(y, Routing(slot, weight), slot, ExpertWeights(up, down), setup)[0]
    y.backward(torch.ones_like(y))
    torch.cuda.synchronize()
    return [y.detach(), x.grad, up.grad, down.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("arena", [0, 1 << 30], ids=["tensors", "arena"])
def test_every_policy_gives_the_same_bits_over_nvlink(arena: int) -> None:
    transport = NVLink(None, SLOTS, NVLinkOptions(max_tokens=TOKENS, arena_bytes=arena, num_leases=2))
    want = train(transport, ActivationPolicies(), Offloader())
    for rows in ("save", "resend", "offload"):
        for hidden in ("save", "recompute", "offload"):
            policies, offloader = ActivationPolicies(rows, hidden), Offloader()  # type: ignore[arg-type]
            for _ in range(3):  # the first may find the arenas of host memory too small
                got = train(transport, policies, offloader)
                overflows = transport.buffers.arena_overflows()
                for one, size in zip(transport.buffers.arenas, overflows, strict=True):
                    if size:
                        one.grow(int(1.25 * size))
                if not any(overflows):
                    break
            assert not any(overflows), policies
            assert all(map(torch.equal, got, want)), policies
            if transport.buffers.arena is not None:
                transport.buffers.arena.companions.clear()


def test_offloaded_activations_free_the_device() -> None:
    weight = torch.randn(H, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept, grads = [], []
    for offload in (None, ActivationOffload()):
        weight.grad = None
        x = torch.ones(TOKENS, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y: Any = x
        before = torch.cuda.memory_allocated()
        for _ in range(12):
            if offload is None:
                y = torch.nn.functional.gelu(y @ weight / 32)
            else:
                with offload.layer(x.device):
                    y = torch.nn.functional.gelu(y @ weight / 32)
        kept.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        grads.append((x.grad, weight.grad))
    assert kept[1] < kept[0] / 3
    assert all(map(torch.equal, *grads))  # type: ignore[arg-type]
