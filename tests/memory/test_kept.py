"""What rides keep: every policy of every item gives the same bits, and keeps what it says; and the arena: where rows
land, when their place is given back, and what happens when they do not fit."""

from __future__ import annotations

import copy
import gc
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.activations import SAVE_ALL, ActivationPolicies, Arena, HiddenStates, Offloader
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.metrics.counters import LayerStats
from carpool.planner.candidate import POLICIES
from carpool.planner.step.peak import saved_by_rides
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.routing import Routing
from carpool.transport import make_transport
from tests.ranks import Ranks, mesh

CPU = torch.device("cpu")
EVERY = [
    ActivationPolicies(rows, hidden)
    for rows, hidden in product(("save", "resend", "offload"), ("save", "recompute", "offload"))
]
# Tokens of each rank in two micro-batches.
SIZES = ((7, 0), (12, 5))
H, F, E, K = 24, 20, 8, 3
SCHEDULES = {"gather": Schedule("chunks", 3), "alltoall": Schedule("chunks", 4, 2), "dedup": Schedule("chunks", 2, 4)}


def layers(transport: str, schedule: Schedule, grid: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(carpool.MoE(H, F, E, K, ep_mesh=grid, transport=transport, schedule=schedule, bias=True) for _ in range(3))
    )


def train(net: torch.nn.Sequential, policies: ActivationPolicies) -> list[torch.Tensor]:
    """Output and gradients of two micro-batches, on this rank."""
    offloader = Offloader() if policies.offloads else None
    for layer in net:
        layer.set_activation_policies(policies, offloader)  # type: ignore[operator]
    net.zero_grad()
    found = []
    for seed, sizes in enumerate(SIZES):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(sum(sizes), H, generator=generator).split(sizes)[torch.distributed.get_rank()]
        x = x.clone().requires_grad_()
        y = net(x)
        y.square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    if offloader is not None:
        assert offloader._lanes[0].number == 6 and not offloader._parcels, "each ride has offloaded, and nothing stays"
    return found + [p.grad.clone() for p in net.parameters() if p.grad is not None]


def differing(transport: str) -> list[str]:
    wrong = []
    for schedule in (SCHEDULES[transport], *([Schedule()] if transport == "dedup" else [])):
        net = layers(transport, schedule, mesh((2,), ("ep",)))
        want = train(net, SAVE_ALL)
        for policies in EVERY[1:]:
            got = train(net, policies)
            if len(got) != len(want) or not all(map(torch.equal, got, want)):
                wrong.append(f"{schedule} {policies}")
    return wrong


@pytest.mark.parametrize("transport", ["gather", "alltoall", "dedup"])
def test_every_policy_gives_the_same_bits(two_ranks: Ranks, transport: str) -> None:
    assert two_ranks(differing, transport) == [[]] * 2


class Layer:
    """One ride on one rank, with an arena or without."""

    def __init__(self, policies: ActivationPolicies, arena: Arena | None = None, tokens: int = 11) -> None:
        generator = torch.Generator().manual_seed(0)
        self.leaves = [
            torch.randn(*shape, generator=generator).mul_(0.3).requires_grad_()
            for shape in ((tokens, H), (tokens, K), (E, 2 * F, H), (E, H, F))
        ]
        self.slot = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int()
        experts = GroupedExperts(
            ExpertFunction(make_activation("silu", gated=True)), recompute=policies.expert_activations == "recompute"
        )
        self.offloader = Offloader()
        transport = make_transport("dedup", None, E)
        if arena is not None:
            transport = WithArena(None, E)
            transport.own = arena
        self.setup = RideSetup(transport, experts, LayerStats(E, 1, 0), policies=policies, offloader=self.offloader)

    def __call__(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x_TH, weight, *weights = self.leaves
        routing = Routing(self.slot, weight)
        return ride(x_TH if x is None else x, routing, self.slot, ExpertWeights(*weights), self.setup)[0]


class WithArena(type(make_transport("dedup", None, 1))):  # type: ignore[misc]
    own: Arena

    @property
    def arena(self) -> Arena:
        return self.own


def saved_bytes(policies: ActivationPolicies) -> int:
    """Of tensors that autograd saves, besides the leaves."""
    layer, found = Layer(policies), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer()
    leaves = {leaf.untyped_storage().data_ptr() for leaf in layer.leaves}
    return sum(t.untyped_storage().nbytes() for where, t in found.items() if where not in leaves)


def test_what_is_not_kept_is_not_saved_and_that_is_predicted() -> None:
    kept = {policies: saved_bytes(policies) for policies in EVERY}
    rows, hidden = 11 * H * 4, 11 * K * 2 * F * 4

    def predicted(policies: ActivationPolicies) -> float:
        items = {"expert_inputs": policies.expert_inputs, "expert_activations": policies.expert_activations}
        return sum(saved_by_rides({**dict.fromkeys(POLICIES, "save"), **items}, 1, rows, hidden, rows).values())

    for policies, size in kept.items():
        gone = (policies.expert_inputs != "save") * rows + (policies.expert_activations != "save") * hidden
        ticket = 8 if policies.offloads else 0
        assert kept[SAVE_ALL] - size == gone - ticket, policies
        if not policies.offloads:
            assert predicted(SAVE_ALL) - predicted(policies) == gone, policies


def test_activated_rows_are_never_kept() -> None:
    shapes: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        Layer(SAVE_ALL)()
    assert any(shape[-1:] == (2 * F,) for shape in shapes), "pre-activations are"
    assert not any(len(shape) == 2 and shape[-1] == F for shape in shapes)


def test_hooks_never_see_an_arena() -> None:
    arena, seen = Arena(1 << 20, CPU), []
    layer = Layer(SAVE_ALL, arena)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        y = layer()
    assert int(arena.needed) > 0 and max(seen) < arena.capacity
    y.sum().backward()
    want = [leaf.grad.clone() for leaf in layer.leaves if leaf.grad is not None]
    plain = Layer(SAVE_ALL)
    plain().sum().backward()
    assert all(map(torch.equal, want, [leaf.grad for leaf in plain.leaves]))


@pytest.mark.parametrize("policy", ["save", "offload"])
def test_a_copy_in_the_place_of_a_handle_is_refused(policy: Any) -> None:
    layer = Layer(ActivationPolicies(expert_inputs=policy, expert_activations=policy), Arena(1 << 20, CPU))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = layer()
    with pytest.raises(RuntimeError, match=r"freed before .* backward: a hook on saved tensors"):
        y.sum().backward()


def test_offloaded_rows_come_back_ahead_and_in_reverse() -> None:
    arena = Arena(1 << 20, CPU)
    layer, asked = Layer(ActivationPolicies("offload", "offload"), arena), []
    fetch, lane = layer.offloader._fetch, None

    def watched(parcel: Any) -> None:
        asked.append((parcel.number, sorted(lane.here)))  # type: ignore[union-attr]
        fetch(parcel)

    layer.offloader._fetch = watched  # type: ignore[method-assign]
    x = layer.leaves[0]
    for _ in range(6):
        x = layer(x)
        lane = layer.offloader._lanes[0]
    assert sorted(lane.here) == [4, 5], "two rides' items are on the device"
    staging, host = arena.companions[:2], arena.companions[2]
    ride_bytes = int(staging[0].needed)
    assert int(arena.needed) == 0 and int(host.needed) == 6 * ride_bytes
    x.square().sum().backward()
    assert [number for number, _ in asked] == [3, 2, 1, 0]
    # Ride 3 is asked for while ride 4 is in use, and so on: never more than two are on the device.
    assert all(int(one.needed) == ride_bytes for one in staging) and not lane.here
    del x
    gc.collect()
    assert not any(held.alive for one in (*staging, host) for _, held in one._stack)


def test_a_host_arena_that_is_too_small_is_noticed() -> None:
    layer = Layer(ActivationPolicies("offload", "offload"), Arena(1 << 12, CPU))
    layer(layer(layer()))
    host = layer.setup.transport.arena.companions[2]  # type: ignore[union-attr]
    assert int(host.needed) > host.capacity
    host.grow(int(host.needed))
    assert int(host.needed) == 0


def test_a_graph_that_is_retained_has_its_rows_again() -> None:
    layer = Layer(ActivationPolicies("offload", "offload"), Arena(1 << 20, CPU))
    y = layer(layer(layer(layer())))
    first = torch.autograd.grad(y.square().sum(), layer.leaves, retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), layer.leaves)
    assert all(map(torch.equal, first, again))


def test_policies_that_are_none() -> None:
    with pytest.raises(ValueError, match="expert_inputs='recompute' is not known; use one of save, resend, offload"):
        ActivationPolicies(expert_inputs="recompute")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="experts='reference' has no option 'recompute'"):
        carpool.MoE(H, F, E, K, experts="reference").set_activation_policies(
            ActivationPolicies(expert_activations="recompute")
        )


@pytest.mark.parametrize(
    ("policies", "inputs", "activations", "outputs", "host"),
    [
        ({}, 47 * 36, 47 * 8, 0, 0),
        ({"expert_inputs": "offload", "expert_activations": "recompute"}, 2 * 36, 0, 0, 47 * 36),
        ({"layer_activations": "offload"}, 47 * 36, 47 * 8, 0, 0),
        (
            {"layer_activations": "recompute", "expert_inputs": "resend", "expert_activations": "recompute"},
            47 * 10, 0, 47 * 10, 0,
        ),
        (
            {"layer_activations": "recompute", "moe_outputs": "recompute", "expert_inputs": "resend"},
            10, 8, 0, 0,
        ),
    ],
)  # fmt: skip
def test_predicted_bytes_of_a_model(
    policies: dict[str, str], inputs: int, activations: int, outputs: int, host: int
) -> None:
    """47 layers, of each 36 bytes of the experts' inputs, 8 of their pre-activations, 10 of its own tokens."""
    found = saved_by_rides({**dict.fromkeys(POLICIES, "save"), **policies}, 47, 36.0, 8.0, 10.0)
    assert found == {
        "expert_inputs": inputs, "expert_activations": activations, "moe_outputs": outputs, "host": host,
    }  # fmt: skip


def test_layers_that_are_copied_share_an_offloader_of_their_own() -> None:
    """So that the backward of a layer asks for the items of the one before it."""
    net, offloader = torch.nn.Sequential(*(carpool.MoE(H, F, E, K) for _ in range(2))), Offloader()
    for layer in net:
        layer.set_activation_policies(ActivationPolicies("offload", "offload"), offloader)  # type: ignore[operator]
    net(torch.randn(5, H)).sum().backward()
    first, second = (layer.core.offloader for layer in copy.deepcopy(net))
    assert first is second is not offloader and first is not None and not first._lanes


def count(n: int) -> torch.Tensor:
    return torch.tensor([n])


def start(rows: HiddenStates) -> int:
    assert rows.start is not None
    return int(rows.start)


def write(rows: HiddenStates, value: float, n: int) -> None:
    # As a kernel does: autograd does not see it.
    rows.data.data[start(rows) : start(rows) + n * rows.width] = value


def test_places_in_an_arena() -> None:
    arena = Arena(1 << 16, CPU)
    a, b = arena.reserve(7, torch.float32, count(5)), arena.reserve(24, torch.bfloat16, count(3))
    write(a, 1.0, 5)
    write(b, 2.0, 3)
    assert torch.equal(a.contiguous(5), torch.ones(5, 7))
    assert torch.equal(b.contiguous(3), torch.full((3, 24), 2.0, dtype=torch.bfloat16))
    assert int(arena.needed) == 256 + 256
    arena = Arena(1 << 16, CPU)
    a, b, c = (arena.reserve(64, torch.float32, count(1)) for _ in range(3))
    del b  # below c: its place stays taken until c is released
    d = arena.reserve(64, torch.float32, count(1))
    assert [start(r) for r in (a, c, d)] == [0, 128, 192]
    del c, d
    e = arena.reserve(64, torch.float32, count(2))
    assert start(e) == 64 and int(arena.pointer) == 256 + 512
    arena = Arena(1024, CPU)
    fits = arena.reserve(64, torch.float32, count(4))
    late = arena.reserve(64, torch.float32, count(1))
    assert start(fits) == 0 and start(late) == -1
    assert int(arena.needed) == 1280 > arena.capacity
    del late
    assert start(arena.reserve(64, torch.float32, count(0))) == 256  # nothing to write: it fits
    arena = Arena(4096, torch.device("cpu"))
    rows = arena.reserve(4, torch.float32, torch.tensor([3]))
    with pytest.raises(RuntimeError, match="still keeps rows"):
        arena.restart()
    del rows
    arena.restart()
    assert arena.reserve(4, torch.float32, torch.tensor([3])).start.tolist() == [0]


def test_autograd_and_checkpointing_hold_the_place_just_as_long_as_they_need_it() -> None:
    arena, used = Arena(1 << 16, CPU), []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            rows = arena.reserve(4, torch.float32, count(2))
            ctx.save_for_backward(rows.data, rows.start)
            return x * 2

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            data, where = ctx.saved_tensors
            write(HiddenStates(data, 4, where), 3.0, 2)
            used.append(sum(held.alive for _, held in arena._stack))
            return dy * 2

    x = torch.ones(2, requires_grad=True)
    y = Keep.apply(Keep.apply(x))
    assert sum(held.alive for _, held in arena._stack) == 2
    y.sum().backward()
    assert used == [2, 1] or used == [2, 2]
    del y
    assert not any(held.alive for _, held in arena._stack)
    used.clear()
    y = checkpoint(Keep.apply, checkpoint(Keep.apply, x, use_reentrant=False), use_reentrant=False)
    assert not any(held.alive for _, held in arena._stack), "what is recomputed is not kept"
    y.sum().backward()
    assert used == [1, 1]
