"""A backward in two: the weights' part is not computed before it is asked for, and nothing else is different."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.experts.gemm.grouped import GroupedProducts
from carpool.ride.split_backward import SplitBackward

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
@pytest.mark.parametrize("again", [False, True])
def test_weights_wait_and_are_the_same(rows: str, again: bool) -> None:
    torch.manual_seed(0)
    model = Block().double()
    model.moe.set_activation_policies(carpool.ActivationPolicies(expert_inputs=rows))
    whole, x_NTH = copy.deepcopy(model), torch.randn(3, 17, 12, dtype=torch.float64, requires_grad=True)

    def loss(model: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
        y_TH = checkpoint(model, x_TH, use_reentrant=False) if again else model(x_TH)
        return y_TH.sin().sum()

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
