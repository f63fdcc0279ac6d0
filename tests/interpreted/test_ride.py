"""Whole rides over the `nvlink` transport in Triton's interpreter: each emulated rank is a thread of its own.

Between sending and receiving the threads meet, so that no kernel waits for one that has not run. Output and every
gradient equal those of one rank that holds all experts, whatever is kept for the backward.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from carpool.activations import ActivationPolicies, Arena, Offloader
from carpool.experts import Choices, ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.experts.gemm import grouped
from carpool.experts.gemm.grouped import GroupedProducts
from carpool.layout import ExpertLayout
from carpool.metrics.counters import LayerStats
from carpool.replicas.slot_plan import Costs
from carpool.ride.balanced import BalancedOrder, SpareSlotOptions, SpareSlots
from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.function import ride
from carpool.ride.ride_module import ride_module
from carpool.ride.setup import NO_HOOKS, Order, RideSetup
from carpool.routing import Routing
from carpool.transport import make_transport
from tests.interpreted.emulated import Meeting, connect, emulate, on_threads
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
    generator = torch.Generator().manual_seed(0)
    experts = RANKS * SLOTS
    rows = next((policy for policy in ("offload", "resend") if policy in kept), "save")
    hidden = "recompute" if "recompute" in kept else "save" if rows == "resend" else rows
    policies = ActivationPolicies(rows, hidden)  # type: ignore[arg-type]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    up, down = draw(experts, 2 * INNER, HIDDEN), draw(experts, HIDDEN, INNER)
    slot = torch.rand(sum(TOKENS), experts, generator=generator).argsort(1)[:, :TOP_K].int()
    slot[::4, 1] = -1
    x, dy, weight = draw(sum(TOKENS), HIDDEN), draw(sum(TOKENS), HIDDEN), draw(sum(TOKENS), TOP_K).abs()

    balanced, layout = "balanced" in kept, ExpertLayout.contiguous(experts, RANKS)
    options_of_slots = SpareSlotOptions(1, limit=1.0, costs=Costs(limit=1000))

    def forward_and_backward(
        transport: Any, mine: slice, homes: slice, stats: LayerStats, chunks: int = 1, rank: int | None = None
    ) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x[mine], weight[mine], up[homes], down[homes])]
        weights, routing = ExpertWeights(leaves[2], leaves[3]), Routing(slot[mine], leaves[1])
        if own_forward:

            def module(x_RH: torch.Tensor, slot_RJ: torch.Tensor, weight_RJ: torch.Tensor) -> torch.Tensor:
                # Every row through every expert, as a dense module might: what nobody wants must not be NaN.
                h = torch.einsum("rh,sfh->rsf", x_RH, weights.up_SFH)
                y = torch.einsum("rsf,shf->rsh", FUNCTION.activation(h), weights.down_SHF)
                mask = torch.nn.functional.one_hot(slot_RJ.long() + 1, weights.up_SFH.shape[0] + 1)[..., 1:]
                return torch.einsum("rsh,rjs,rj->rh", y, mask.float(), weight_RJ)

            y = ride_module(leaves[0], routing, slot[mine], module, RideSetup(transport, None, stats))
        else:
            order: Order = PLAIN if chunks == 1 else ChunkedOrder(chunks, chunks)
            if balanced and rank is not None:
                links = transport.slot_links(layout, 1)
                spare = SpareSlots(layout, rank, options_of_slots, links, lambda weights: Costs(), torch.zeros(RANKS))
                order = BalancedOrder(order, spare)
            choices = Choices.all("wide") if "fused" in kept else None
            experts_made = GroupedExperts(FUNCTION, choices, policies.expert_activations == "recompute")
            setup = RideSetup(transport, experts_made, stats, order, NO_HOOKS, policies, Offloader())
            y, _ = ride(leaves[0], routing, slot[mine], weights, setup)
        y.backward(dy[mine])
        if balanced and rank is not None:
            load = spare.load()
            assert load.replicas > 0 and load.after < load.before
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    every = slice(None)
    want = forward_and_backward(make_transport("dedup", None, experts), every, every, LayerStats(experts, 1, 0))

    options: dict[str, Any] = {}
    # Sent and received by two launches, a combine gives its lease back only when it is waited for.
    options["num_leases"] = 2 * max(2, chunks)
    transports = emulate(RANKS, SLOTS + balanced, capacity=max(TOKENS), row_bytes=4 * HIDDEN, top_k=TOP_K, **options)
    meeting = Meeting(RANKS)
    connect(transports, meeting)
    for transport in transports:
        for lease in transport.buffers._leases:
            lease.bytes[lease.regions.tokens :] = 0xFF  # NaN, in every place that nobody writes
        if "arena" in kept:
            transport.buffers.arena = Arena(1 << 16, torch.device("cpu"))
            transport.buffers.arena.bytes.fill_(0xFF)
    starts = [sum(TOKENS[:rank]) for rank in range(RANKS)]

    def work(rank: int) -> list[torch.Tensor]:
        mine = slice(starts[rank], starts[rank] + TOKENS[rank])
        homes = slice(rank * SLOTS, (rank + 1) * SLOTS)
        return forward_and_backward(transports[rank], mine, homes, LayerStats(experts, RANKS, rank), chunks, rank)

    with ExitStack() as patches:
        if "fused" in kept:
            patches.enter_context(tiny_tiles())
            for name in ("up", "down", "dact", "dx", "dup", "ddown"):
                locked = meeting.locked(getattr(GroupedProducts, name))
                patches.enter_context(mock.patch.object(GroupedProducts, name, locked))
            patches.enter_context(mock.patch.object(grouped, "sum_pairs", meeting.locked(grouped.sum_pairs)))
        got = on_threads(RANKS, work)
    for number in range(5):
        together = torch.cat([result[number] for result in got])
        torch.testing.assert_close(together, want[number], rtol=1e-4, atol=1e-4)
    assert not any(transport.buffers.busy for transport in transports)
    for arenas in (transport.buffers.arenas for transport in transports):
        used = [int(arena.needed) > 0 for arena in arenas]
        # Offloaded rows go through one of the staging arenas to the host's, and never into the layers' own.
        assert used == ([] if "arena" not in kept else [True] if "offload" not in kept else [False, True, False, True])
        gc.collect()  # the interpreter leaves cycles
    assert not any(held.alive for arena in arenas for _, held in arena._stack)
