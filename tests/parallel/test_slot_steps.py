"""Slots that are filled ahead, and gradients that come home late: bit for bit what each layer does by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.replicas.slot_steps import SlotStep
from tests.kept_slots import slots_kept
from tests.layouts import EXPERTS, layout_of
from tests.ranks import Ranks, mesh

H, F, K = 16, 8, 4
SIZES = (7, 0, 5, 3)
# By layer: replicas, none, and replicas with other homes and an empty slot.
LAYERS = ("replicated", "permuted", "replicated_permuted")
Keep = Callable[[torch.nn.Module], AbstractContextManager[None]]


class Net(torch.nn.Module):
    def __init__(self, ep: int, dtype: torch.dtype, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        grid, self.checkpointed = mesh((4 // ep, ep), ("edp", "ep")), checkpointed
        self.layers = torch.nn.ModuleList(
            carpool.MoE(H, F, EXPERTS, K, ep_mesh=grid["ep"], layout=layout_of(name, ep), bias=True, dtype=dtype)
            for name in LAYERS
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x

    def of_fillers(self, what: str) -> int:
        return sum(getattr(layer.core.filler, what) for layer in self.layers)


def tokens(number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(SIZES[dist.get_rank()], H, generator=generator).to(dtype)


def step(net: Net, keep: AbstractContextManager[None], micro_batches: int) -> list[torch.Tensor]:
    """Outputs, and all gradients of these micro-batches."""
    dtype, seen = net.layers[0].up_proj.dtype, []
    net.zero_grad(set_to_none=True)
    for layer in net.layers:
        layer.core.filler.reset()
    with keep:
        for number in range(micro_batches):
            x = tokens(number, dtype).requires_grad_()
            y = net(x)
            y.float().square().sum().backward()
            seen += [y.detach(), x.grad]
    return [*seen, *(p.grad for p in net.parameters())]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def compared(ep: int, dtype: torch.dtype, checkpointed: bool, micro_batches: int) -> list[Any]:
    net = Net(ep, dtype, checkpointed)
    found: list[Any] = []
    want = step(net, nullcontext(), micro_batches)
    often, summed = net.of_fillers("bytes_filled"), net.of_fillers("bytes_summed")
    for prefetch in (False, True):
        equal = same(step(net, slots_kept(net, prefetch), micro_batches), want)
        once = often == net.of_fillers("bytes_filled") * micro_batches * (1 + checkpointed)
        received = sum(
            sum(layer.core.filler.hops[0].receive) * p[0].nbytes
            for layer in net.layers
            if layer.core.filler.travels
            for p in layer.expert_parameters()
        )
        counted = net.of_fillers("bytes_ahead") == (received if prefetch else 0)
        waited = all(
            ("fill" in layer.core.stats.meter.milliseconds()) == layer.core.filler.travels for layer in net.layers
        )
        found.append((equal, once, summed == net.of_fillers("bytes_summed"), counted, waited))
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("ep, dtype, checkpointed", [(4, torch.float32, True), (4, torch.bfloat16, False),
                                                     (2, torch.bfloat16, True)])  # fmt: skip
def test_the_same_bits(ep: int, dtype: torch.dtype, checkpointed: bool, micro_batches: int, ranks: Ranks) -> None:
    for found in ranks(compared, ep, dtype, checkpointed, micro_batches):
        assert found == [(True,) * 5] * 2


def broken(how: str) -> bool:
    net = Net(4, torch.float32, False)
    want = step(net, nullcontext(), 2)
    settle, sent = SlotStep._settle, []

    def settle_but(self: SlotStep, name: str) -> None:
        """The first gradient that comes counts not at all, or twice."""
        before = self._coming.get(name)
        if before is not None and not sent:
            sent.append(before)
            if how == "lost":
                del self._coming[name]
                before[0].wait()
                return
            settle(self, name)
            self._coming[name] = before
        settle(self, name)

    with mock.patch.object(SlotStep, "_settle", settle_but):
        return same(step(net, slots_kept(net), 2), want)


@pytest.mark.parametrize("how", ["lost", "twice"])
def test_a_gradient_that_is_lost_or_counts_twice_shows(how: str, ranks: Ranks) -> None:
    assert not any(ranks(broken, how)[rank] for rank in (0, 1))


def evaluated() -> tuple[bool, bool, bool]:
    net = Net(4, torch.float32, False)
    with torch.no_grad():
        want = [net(tokens(number, torch.float32)) for number in range(2)]
        often = net.of_fillers("bytes_filled")
        step(net, slots_kept(net), 0)  # nothing runs: what was started is waited for
        started = net.of_fillers("bytes_filled")
        with slots_kept(net):
            got = [net(tokens(number, torch.float32)) for number in range(2)]
        once = 2 * (net.of_fillers("bytes_filled") - started) == often
        for parameter in net.parameters():
            parameter.add_(0.1)
        want.append(net(tokens(0, torch.float32)))
        with slots_kept(net):
            got.append(net(tokens(0, torch.float32)))
    free = all(layer.core.filler.step is None for layer in net.layers)
    return same(got, want), once, free


def test_evaluation_fills_once_and_weights_that_changed_are_sent_anew(ranks: Ranks) -> None:
    assert ranks(evaluated) == [(True, True, True)] * 4


def other_order() -> bool:
    net = Net(4, torch.float32, False)

    def run() -> list[torch.Tensor]:
        x = tokens(0, torch.float32).requires_grad_()
        net.layers[0](net.layers[2](x)).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]

    want = run()
    net.zero_grad(set_to_none=True)
    with slots_kept(net):
        got = run()
    with slots_kept(net):
        got = [*got[:1], *(p.grad for p in net.parameters() if p.grad is not None)]
    return same(got, want)


def test_layers_may_run_in_another_order_or_not_at_all(ranks: Ranks) -> None:
    assert all(ranks(other_order))


def misused() -> tuple[str, bool]:
    net = Net(4, torch.float32, False)
    with pytest.raises(RuntimeError) as error, slots_kept(net):
        net(tokens(0, torch.float32)).sum().backward()
        net.zero_grad(set_to_none=True)
    return str(error.value), same(step(net, slots_kept(net), 2), step(net, nullcontext(), 2))


def test_gradients_that_are_gone_are_missed(ranks: Ranks) -> None:
    """Rank 0 is home to experts with replicas in the first layer; afterwards all is as before."""
    for message, fine in ranks(misused)[:1]:
        assert "must not be set to None" in message and fine
