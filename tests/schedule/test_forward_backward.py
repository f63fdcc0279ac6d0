"""A forward beside a backward through the same layers, which FSDP shards. Pairs: tests/train/test_pipeline.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from carpool.ride.turns import handover
from carpool.schedule.forward_backward import ForwardBesideBackward
from tests.parallel.test_fsdp import alone

__all__ = ["alone"]


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
