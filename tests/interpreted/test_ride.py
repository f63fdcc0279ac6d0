"""Whole rides over the `nvlink` transport in Triton's interpreter: each emulated rank is a thread of its own.

Between sending and receiving the threads meet, so that no kernel waits for one that has not run. Output and every
gradient equal those of one rank that holds all experts, whatever is kept for the backward.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from carpool.activations import ActivationPolicies, Arena, Offloader
from carpool.experts import Choices, ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.layout import ExpertLayout
from carpool.metrics.counters import LayerStats
from carpool.replicas.slot_plan import Costs
from carpool.ride.balanced import BalancedOrder, SpareSlotOptions, SpareSlots
from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.function import ride
from carpool.ride.ride_module import ride_module
from carpool.ride.setup import NO_HOOKS, Order, RideSetup
from carpool.routing import Routing
from tests.interpreted.emulated import CPU, Meeting, RideProblem, connect, emulate
from tests.interpreted.test_gemm import tiny_tiles

TOKENS, TOP_K, SLOTS, HIDDEN, INNER = (7, 0, 5), 3, 2, 16, 8
RANKS = len(TOKENS)
FUNCTION = ExpertFunction(make_activation("silu", gated=True))


# What a module sees is kept by autograd, whatever the transport would keep.
@pytest.mark.parametrize(
    ("kept", "own_forward", "chunks"),
    [
        *[("copy", False, 1), ("arena", False, 1), ("resend", False, 1), ("copy", True, 1)],
        *[("copy", False, 3), ("arena", False, 3), ("resend", False, 2)],
        *[("offload", False, 1), ("arena offload", False, 2), ("arena offload recompute", False, 1)],
        # In spare slots, fetched over peer memory, and in the backward again.
        *[("copy balanced", False, 1), ("resend balanced", False, 1), ("arena balanced", False, 3)],
        # Homes where their parameters are, then what was fetched.
        *[("copy balanced fused", False, 1), ("arena balanced fused", False, 2)],
    ],
)
def test_output_and_gradients_are_those_of_one_rank(kept: str, own_forward: bool, chunks: int) -> None:
    problem = RideProblem(TOKENS, TOP_K, SLOTS, HIDDEN, INNER)
    rows = next((policy for policy in ("offload", "resend") if policy in kept), "save")
    hidden = "recompute" if "recompute" in kept else "save" if rows == "resend" else rows
    policies = ActivationPolicies(rows, hidden)  # type: ignore[arg-type]
    balanced, layout = "balanced" in kept, ExpertLayout.contiguous(problem.experts, RANKS)
    options_of_slots = SpareSlotOptions(1, limit=1.0, costs=Costs(limit=1000))
    loads = []

    def call(
        transport: Any, x: torch.Tensor, routing: Routing, weights: ExpertWeights, stats: LayerStats, rank: int | None
    ) -> torch.Tensor:
        if own_forward:

            def module(x_RH: torch.Tensor, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor) -> torch.Tensor:
                # Every row through every expert, as a dense module might: what nobody wants must not be NaN.
                h = torch.einsum("rh,sfh->rsf", x_RH, weights.up_SFH)
                y = torch.einsum("rsf,shf->rsh", FUNCTION.activation(h), weights.down_SHF)
                mask = torch.nn.functional.one_hot(slot_RJ.long() + 1, weights.up_SFH.shape[0] + 1)[..., 1:]
                return torch.einsum("rsh,rjs,rj->rh", y, mask.float(), weight_RJ)

            return ride_module(x, routing, routing.expert_TK, module, RideSetup(transport, None, stats))
        order: Order = PLAIN if chunks == 1 or rank is None else ChunkedOrder(chunks, chunks)
        if balanced and rank is not None:
            links = transport.slot_links(layout, 1)
            spare = SpareSlots(layout, rank, options_of_slots, links, lambda weights: Costs(), torch.zeros(RANKS))
            order = BalancedOrder(order, spare)
            loads.append(spare.load)
        choices = Choices.all("wide") if "fused" in kept else None
        experts = GroupedExperts(FUNCTION, choices, policies.expert_activations == "recompute")
        setup = RideSetup(transport, experts, stats, order, NO_HOOKS, policies, Offloader())
        return ride(x, routing, routing.expert_TK, weights, setup)[0]

    want = problem.on_one_rank(call)
    # Sent and received by two launches, a combine gives its lease back only when it is waited for.
    transports = emulate(
        RANKS, SLOTS + balanced, capacity=max(TOKENS), row_bytes=4 * HIDDEN, top_k=TOP_K,
        num_leases=2 * max(2, chunks), filled=0xFF,
    )  # fmt: skip
    meeting = Meeting(RANKS)
    connect(transports, meeting)
    for transport in transports if "arena" in kept else ():
        transport.buffers.arena = Arena(1 << 16, CPU)
        transport.buffers.arena.bytes.fill_(0xFF)
    with tiny_tiles() if "fused" in kept else nullcontext():
        got = problem.on_ranks(call, transports, meeting)
    for together, alone in zip(got, want, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert len(loads) == RANKS * balanced
    for load in (found() for found in loads):
        assert load.replicas > 0 and load.after < load.before
    for arenas in (transport.buffers.arenas for transport in transports):
        used = [int(arena.needed) > 0 for arena in arenas]
        # Offloaded rows go through one of the staging arenas to the host's, and never into the layers' own.
        assert used == ([] if "arena" not in kept else [True] if "offload" not in kept else [False, True, False, True])
        gc.collect()  # the interpreter leaves cycles
    assert not any(held.alive for arena in arenas for _, held in arena._stack)
