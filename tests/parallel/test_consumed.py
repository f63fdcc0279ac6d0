"""Gradients that are used in the backward: the bits of a regular step, the same norm, and hardly any gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from carpool.optim import AdamW
from carpool.optim import in_backward as consumed
from carpool.optim.clip import clip_factor, grad_norm
from carpool.optim.in_backward import ConsumedGradients


class _Layers(nn.Module):
    """Four layers and one that no forward uses; counts the gradients that are there in each step of the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.unused = nn.Linear(3, 3)
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(self._look)
        return x.square().mean()

    def _look(self, _: torch.Tensor) -> None:
        self.most = max(self.most, sum(p.grad is not None for p in self.parameters()))


def _data(step: int) -> torch.Tensor:
    return torch.randn(5, 40, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("least", [1, 10**9])
def test_it_is_a_regular_step(least: int, offload: bool) -> None:
    right, found = _Layers(), _Layers()
    theirs = AdamW(right.parameters(), lr=1e-2, moments="bfloat16")
    ours = AdamW(found.parameters(), lr=1e-2, moments="bfloat16", offload=offload)
    with mock.patch.object(consumed, "LEAST_ELEMENTS", least):
        gradients = ConsumedGradients(found, ours)
        for step in range(3):
            right(_data(step)).backward()
            norm = grad_norm(right.parameters())
            theirs.step()
            theirs.zero_grad()
            loss = found(_data(step))
            gradients.begin(torch.isfinite(loss))
            loss.backward()
            torch.testing.assert_close(gradients.finish(), norm)
            assert all(p.grad is None for p in found.parameters())
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), right.parameters(), strict=True))
    for p, q in zip(found.parameters(), right.parameters(), strict=True):
        assert all(torch.equal(ours.state[p][name], value) for name, value in theirs.state[q].items())
    assert right.most == 6 and found.most == (0 if least == 1 else 6)


def test_it_clips_by_the_norm_of_the_step_before() -> None:
    right, found = _Layers(), _Layers()
    theirs, ours = AdamW(right.parameters(), lr=1e-2), AdamW(found.parameters(), lr=1e-2)
    gradients, norm, clipped = ConsumedGradients(found, ours, max_norm=0.01), torch.zeros(()), 0
    for step in range(4):
        right(_data(step)).backward()
        factor = clip_factor(norm, 0.01)
        clipped += bool(factor < 1)
        norm = grad_norm(right.parameters())
        theirs.step(factor=factor)
        theirs.zero_grad()
        # The second one is void, and its norm counts for nothing.
        for fine in (True, False):
            loss = found(_data(step))
            gradients.begin(torch.tensor(fine))
            loss.backward()
            gradients.finish()
    assert clipped == 3
    # Their norms are summed in other orders.
    for p, q in zip(found.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_what_may_not_be_learned_from_changes_nothing_and_can_be_repeated() -> None:
    model = _Layers()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    gradients = ConsumedGradients(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for fine in (False, True):
        loss = model(_data(0))
        gradients.begin(torch.tensor(fine))
        loss.backward()
        gradients.finish()
        same = [torch.equal(p, q) for p, q in zip(model.layers.parameters(), before, strict=False)]
        assert all(same) if not fine else not any(same)
    assert optimizer.state[model.layers[0].weight]["step"] == 1


def test_other_backwards_keep_their_gradients() -> None:
    model = _Layers()
    ConsumedGradients(model, AdamW(model.parameters()))
    before = model.layers[0].weight.detach().clone()
    model(_data(0)).backward()
    assert model.layers[0].weight.grad is not None and torch.equal(model.layers[0].weight, before)
