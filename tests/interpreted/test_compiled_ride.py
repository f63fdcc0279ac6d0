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
from tests.interpreted.emulated import CPU, RideProblem, emulate

TOP_K, SLOTS, HIDDEN = 3, 4, 16


@pytest.mark.parametrize("kept", ["copy", "arena", "resend", "arena offload"])
def test_compiled_equals_eager_and_keeps_no_input(kept: str) -> None:
    problem = RideProblem((11,), TOP_K, SLOTS, HIDDEN, inner=12)
    transports = emulate(1, SLOTS, capacity=16, row_bytes=4 * HIDDEN, top_k=TOP_K)
    buffers = transports[0].buffers
    if "arena" in kept:
        buffers.arena = Arena(1 << 16, CPU)
    experts = GroupedExperts(ExpertFunction(make_activation("silu", gated=True)))
    offload = "offload" if "offload" in kept else "save"
    policies = ActivationPolicies("resend" if kept == "resend" else offload, offload)  # type: ignore[arg-type]
    setup = RideSetup(transports[0], experts, LayerStats(SLOTS, 1, 0), policies=policies, offloader=Offloader())

    def eager(_: Any, x: torch.Tensor, routing: Routing, weights: ExpertWeights, *rest: Any) -> torch.Tensor:
        return ride(x, routing, problem.slot, weights, setup)[0]

    def function(x_TH: torch.Tensor, weight_TK: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return ride(x_TH, Routing(problem.slot, weight_TK), problem.slot, ExpertWeights(*tensors), setup)[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    want = problem.on_ranks(eager, transports)
    assert len(want) == 5
    got = problem.on_ranks(lambda _, x, routing, w, *rest: compiled(x, routing.weight_TK, *w[:2]), transports)
    assert all(map(torch.equal, got, want))

    x, weight, slot, dy, weights = problem.x, problem.weight, problem.slot, problem.dy, (problem.up, problem.down)
    inputs = [tensor.clone() for tensor in (x, weight, slot)]
    _, ticket = ride_operator.ride_operator(*inputs, *weights, *(None,) * 10, slot, setup.number, True)
    for tensor in inputs:
        tensor.fill_(-1)
    found = ride_operator.ride_backward_operator(dy, ticket, x, weight, slot, *weights, *(None,) * 10, True)
    assert all(map(torch.equal, found, want[1:]))

    del ticket
    gc.collect()
    assert not ride_operator._SAVED and not buffers.busy
    if "arena" in kept:
        assert int(buffers.arenas[-1].needed)
        assert not any(held.alive for one in buffers.arenas for _, held in one._stack)
