"""Parts of a ride: a backward in two, a ride in chunks, and a forward beside a backward through the same layers, which
FSDP shards. Pairs: tests/train/test_pipeline.py."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.distributed import DistributedConfig

import carpool
import carpool.hf  # registers the layers
from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.hf.build_model import build_model
from carpool.hf.decoder_layers import recompute_layers
from carpool.hf.weights.model_config import make_config
from carpool.metrics.counters import LayerStats
from carpool.ride.forward_backward import ForwardBesideBackward
from carpool.ride.function import ride
from carpool.ride.schedule import Schedule
from carpool.ride.setup import RideSetup
from carpool.ride.split_backward import SplitBackward
from carpool.ride.turns import handover
from carpool.routing import Routing
from carpool.transport import NVLinkOptions, Pending
from carpool.transport.dedup import Dedup
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.parallel.test_fsdp import alone
from tests.ranks import Ranks

LATER = {"attention.weight", "attention.bias", "moe.up_proj", "moe.down_proj"}


class Block(nn.Module):
    """A linear layer, a mixture, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(12, 12)
        self.moe = carpool.MoE(12, 7, 5, 2)
        self.norm = nn.LayerNorm(12)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x_TH + self.moe(self.attention(x_TH)))
        return out


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", ["save", "resend", "offload"])
@pytest.mark.parametrize("how", ["eager", "recomputed", "compiled"])
def test_weights_wait_and_are_the_same(rows: str, how: str) -> None:
    torch.manual_seed(0)
    model = Block().double()
    model.moe.set_activation_policies(carpool.ActivationPolicies(expert_inputs=rows))
    whole, x_NTH = copy.deepcopy(model), torch.randn(3, 17, 12, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")

    def loss(model: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
        if how == "recomputed":
            return checkpoint(model, x_TH, use_reentrant=False).sin().sum()
        return (compiled if how == "compiled" and model is not whole else model)(x_TH).sin().sum()

    for x_TH in x_NTH:
        loss(whole, x_TH).backward()
    expected, dx_NTH = gradients(whole), x_NTH.grad
    x_NTH.grad = None
    with SplitBackward(model, [model.moe.core]) as split:
        # The order of ZBV at its end: two backwards, a forward between them, and then the weights' parts.
        first, second = loss(model, x_NTH[0]), loss(model, x_NTH[1])
        at_once = mock.patch.object(GroupedProducts, "dup", side_effect=AssertionError("computed at once"))
        with at_once if rows == "save" else nullcontext():
            first.backward()
        late = [split.weights()]
        assert expected.keys() - gradients(model).keys() == LATER
        third = loss(model, x_NTH[2])
        second.backward()
        late.append(split.weights())
        late[0]()
        third.backward()
        late.append(split.weights())
        assert not torch.equal(gradients(model)["attention.weight"], expected["attention.weight"])
        late[1]()
        late[2]()
    assert torch.equal(x_NTH.grad, dx_NTH)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)
    # Afterwards everything is as it was.
    model.zero_grad()
    for x_TH in x_NTH:
        loss(model, x_TH).backward()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())


TOKENS, HIDDEN, SLOTS, TOP_K = 37, 8, 4, 2
EXPERTS = GroupedExperts(ExpertFunction(make_activation("silu", gated=True)))
PAIRS = [(1, None), (2, None), (8, None), (1, 2), (2, 1), (1, 4), (2, 4), (4, 2), (4, 8), (8, 4), (2, 3)]


class Watched(Dedup):
    """Counts the verbs of each route, and how many dispatches were ever without their combine."""

    def __init__(self) -> None:
        super().__init__(None, SLOTS)
        self.asked: Counter[tuple[str, int]] = Counter()
        self.numbers: dict[int, int] = {}
        self.under_way = self.most = 0

    def _asked(self, verb: str, route: Any, change: int) -> None:
        self.asked[verb, self.numbers.setdefault(id(route), len(self.numbers))] += 1
        self.under_way += change
        self.most = max(self.most, self.under_way)

    def dispatch(self, x_TH: torch.Tensor, route: Any) -> Pending:
        self._asked("dispatch", route, 1)
        return super().dispatch(x_TH, route)

    def dispatch_gradients(self, dy_TH: torch.Tensor, route: Any) -> Pending:
        self._asked("dispatch_gradients", route, 1)
        return super().dispatch_gradients(dy_TH, route)

    def combine(self, route: Any, partial_RH: torch.Tensor) -> Pending:
        self._asked("combine", route, -1)
        return super().combine(route, partial_RH)

    def combine_gradients(self, route: Any, *gradients: torch.Tensor) -> Pending:
        self._asked("combine_gradients", route, -1)
        return super().combine_gradients(route, *gradients)


@pytest.mark.parametrize(("chunks", "backward_chunks"), PAIRS)
def test_each_piece_travels_once_and_finds_a_lease(chunks: int, backward_chunks: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    schedule, transport = Schedule("chunks", chunks, backward_chunks), Watched()
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    slot_TK = torch.rand(TOKENS, SLOTS, generator=generator).argsort(1)[:, :TOP_K].int()
    weight_TK = torch.rand(TOKENS, TOP_K, generator=generator)
    up = torch.randn(SLOTS, 2 * HIDDEN, HIDDEN, generator=generator).requires_grad_()
    weights = ExpertWeights(up, torch.randn(SLOTS, HIDDEN, HIDDEN, generator=generator).requires_grad_())
    order = schedule.order(transport, x_TH.device)
    setup = RideSetup(transport, EXPERTS, LayerStats(SLOTS, 1, 0), order)
    y_TH, _ = ride(x_TH, Routing(slot_TK, weight_TK), slot_TK, weights, setup)
    y_TH.backward(torch.ones_like(y_TH))
    verbs = "dispatch", "combine", "dispatch_gradients", "combine_gradients"
    assert transport.asked == Counter({(verb, part): 1 for verb in verbs for part in range(schedule.pieces)})
    assert transport.under_way == 0
    assert transport.most <= NVLinkOptions().under(schedule).num_leases


__all__ = ["alone"]
RANKS_IMPORT = ("transformers.models.olmoe.modeling_olmoe",)


class Ride(torch.autograd.Function):
    """Something is under way in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        handover()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        handover()
        return dy.clone()


class ShardedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.after(Ride.apply(torch.tanh(self.before(x)))))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_they_may_meet_in_a_layer(alone: Any, blocks: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)

    def gradients(at_once: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*(ShardedBlock() for _ in range(blocks)))
        for layer in (*model, model):
            fully_shard(layer, mesh=alone)
        first = model(x[0]).square().sum()
        if at_once:
            second = ForwardBesideBackward(model).run(lambda: model(x[1]), first.backward, lambda half: None)
        else:
            first.backward()
            second = model(x[1])
        second.square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


def _gradients(at_once: bool, ride_again: bool | None) -> list[torch.Tensor]:
    """Of two micro-batches; at once: the forward of the second beside the backward of the first."""
    reuse_meshes()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = make_config("olmoe", {**sizes, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2})
    mesh = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="carpool")
    model: Any = build_model(config, distributed_config=mesh, dtype=torch.float32, seed=0).train()
    if ride_again is not None:
        recompute_layers(model, ride_again)
    ids_BL = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))

    def forward(number: int) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids_BL[number : number + 1], labels=ids_BL[number : number + 1]).loss
        return loss

    first = forward(0)
    if at_once:
        second = ForwardBesideBackward(model).run(lambda: forward(1), first.backward, lambda half: None)
    else:
        first.backward()
        second = forward(1)
    second.backward()
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("ride_again", [None, False, True])
def test_they_may_meet_in_a_ride(two_ranks: Ranks, ride_again: bool | None) -> None:
    """With experts that FSDP has, of which transformers gives the module local tensors while it computes."""
    both = zip(*(two_ranks(_gradients, at_once, ride_again)[0] for at_once in (True, False)), strict=True)
    assert all(torch.equal(one, other) for one, other in both)
