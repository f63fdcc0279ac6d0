"""A forward beside a backward through the same layers, which FSDP shards. Pairs: tests/train/test_pipeline.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import carpool.hf  # noqa: F401  registers the layers
from carpool.hf.build_model import build_model
from carpool.hf.decoder_layers import recompute_layers
from carpool.hf.weights.model_config import make_config
from carpool.ride.forward_backward import ForwardBesideBackward
from carpool.ride.turns import handover
from tests.full_tensor import full_tensor
from tests.hf.meshes import reuse_meshes
from tests.parallel.test_fsdp import alone
from tests.ranks import Ranks

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


class Block(nn.Module):
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
        model = nn.Sequential(*(Block() for _ in range(blocks)))
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
