"""The compiled ride over the `nvlink` transport in Triton's interpreter: on one rank, whose rows are all at home."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from carpool.activations import ActivationPolicies, Arena, Offloader
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.metrics.counters import LayerStats
from carpool.ride import operator as ride_operator
from carpool.ride.function import ride
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from tests.interpreted.emulated import emulate

TOKENS, TOP_K, SLOTS, HIDDEN, INNER = 11, 3, 4, 16, 12


@pytest.mark.parametrize("kept", ["copy", "arena", "resend", "arena offload"])
def test_compiled_equals_eager_and_keeps_no_input(kept: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, dy = draw(TOKENS, HIDDEN), draw(TOKENS, TOP_K).abs(), draw(TOKENS, HIDDEN)
    weights = draw(SLOTS, 2 * INNER, HIDDEN), draw(SLOTS, HIDDEN, INNER)
    slot = torch.rand(TOKENS, SLOTS, generator=generator).argsort(1)[:, :TOP_K].int()
    slot[::4, 1] = -1
    (transport,) = emulate(1, SLOTS, capacity=16, row_bytes=4 * HIDDEN, top_k=TOP_K)
    arena = Arena(1 << 16, torch.device("cpu"))
    if "arena" in kept:
        transport.buffers.arena = arena
    experts = GroupedExperts(ExpertFunction(make_activation("silu", gated=True)))
    offload = "offload" if "offload" in kept else "save"
    policies = ActivationPolicies("resend" if kept == "resend" else offload, offload)  # type: ignore[arg-type]
    setup = RideSetup(transport, experts, LayerStats(SLOTS, 1, 0), policies=policies, offloader=Offloader())

    def call(x_TH: torch.Tensor, weight_TK: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return ride(x_TH, Routing(slot, weight_TK), slot, ExpertWeights(*tensors), setup)[0]

    def train(function: Any) -> list[torch.Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, *weights)]
        y = function(*leaves)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    want = train(call)
    assert len(want) == 5
    got = train(torch.compile(call, backend="aot_eager", fullgraph=True))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)

    inputs = [tensor.clone() for tensor in (x, weight, slot)]
    _, ticket = ride_operator.ride_operator(*inputs, *weights, *(None,) * 10, slot, setup.number, True)
    for tensor in inputs:
        tensor.fill_(-1)
    got = ride_operator.ride_backward_operator(dy, ticket, x, weight, slot, *weights, *(None,) * 10, True)
    for ours, theirs in zip(got, want[1:], strict=True):
        assert torch.equal(ours, theirs)

    del ticket
    gc.collect()
    assert not ride_operator._SAVED and not transport.buffers.busy
    if "arena" in kept:
        assert int(transport.buffers.arenas[-1].needed)
        assert not any(held.alive for one in transport.buffers.arenas for _, held in one._stack)
