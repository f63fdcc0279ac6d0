"""Slots that are filled ahead, and gradients that come home late: bit for bit what each layer does by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import carpool
from carpool import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.policies import LoadModel
from carpool.planner.machine.cost import CostModel
from carpool.replicas.node_slots import NodeSlotFiller, crosses_once, make_filler, rows_filled
from carpool.replicas.slots import SlotFiller
from tests.kept_slots import slots_kept
from tests.layouts import EXPERTS, layout_of
from tests.ranks import WORLD_SIZE, Ranks, mesh

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


NODES = Topology.even(WORLD_SIZE, 2)
PLAIN = ExpertLayout.contiguous(10, WORLD_SIZE)
EVERYWHERE = PLAIN.with_replicas((e, r) for e in range(10) for r in range(WORLD_SIZE) if e not in PLAIN.homes[r])
LAYOUTS = {
    "everywhere": EVERYWHERE,
    # Expert 0 is computed elsewhere alone, and a rank has an empty slot.
    "some": ExpertLayout(PLAIN.homes, ((1, 2), (3, 4, 5, 6), (6, 7, -1, 0, 1), (8, 9, 0, 1, 5))),
}
WIDTH = 3


def filled(name: str) -> Any:
    """Of both fillers: slots and the gradient of the homes; and bytes that the two hops sent, there and back."""
    rank, layout = dist.get_rank(), LAYOUTS[name]
    group = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"].get_group()
    generator, found = torch.Generator().manual_seed(rank), []
    device = mesh((1, WORLD_SIZE), ("edp", "ep")).device_type
    home = torch.randn(len(layout.homes[rank]), WIDTH, generator=generator).to(device).requires_grad_()
    dslots = torch.randn(len(layout.slots[rank]), WIDTH, generator=generator).to(device)
    two = make_filler(layout, group)
    assert isinstance(two, NodeSlotFiller)
    for filler in (SlotFiller(layout, group), two):
        slots = filler.fill(home, "up")
        (gradient,) = torch.autograd.grad(slots, home, dslots)
        found.append((slots.detach(), gradient))
    return *found, [(hop.bytes_filled, hop.bytes_summed) for hop in two.hops], (two.bytes_filled, two.bytes_summed)


def test_a_node_that_computes_nothing_takes_one_hop() -> None:
    homes = ((0,), (1,), (2,), (3,))
    assert crosses_once(ExpertLayout(homes, ((0, 1, 2, 3), (2, 3, 0, 1), (2, -1, -1, -1), (-1,) * 4)), NODES)
    # On ranks of that node alone there would be no layout of the second hop, and the others would wait for them.
    assert not crosses_once(ExpertLayout(homes, ((0, 1, 2, 3), (2, 3, 0, 1), (-1,) * 4, (-1,) * 4)), NODES)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_same_with_fewer_bytes_between_nodes(name: str, ranks: Ranks) -> None:
    layout, row = LAYOUTS[name], 4 * WIDTH
    sent_WW, far_WW = rows_filled(layout, NODES), NODES.pairs["network"]
    assert (sent_WW * far_WW).sum() < (rows_filled(layout, None) * far_WW).sum()
    every = ranks(filled, name)
    for rank, ((slots, gradient), (same, close), (between, inside), both) in enumerate(every):
        real = torch.tensor([e != -1 for e in layout.slots[rank]])
        assert torch.equal(slots[real], same[real])
        torch.testing.assert_close(close, gradient)
        assert between[0] == row * (sent_WW * far_WW)[rank].sum() and inside[0] == row * (sent_WW * ~far_WW)[rank].sum()
        assert both == (between[0] + inside[0], between[1] + inside[1])
    assert sum(one[2][0][1] for one in every) == row * (sent_WW * far_WW).sum(), "as many gradients come back"


def test_two_hops_only_where_they_save() -> None:
    assert crosses_once(EVERYWHERE, NODES)
    assert not crosses_once(EVERYWHERE, None) and not crosses_once(EVERYWHERE, Topology.even(WORLD_SIZE))
    assert not crosses_once(PLAIN.with_replicas([(0, 3)]), NODES), "one rank of the other node wants it"
    assert not crosses_once(EVERYWHERE, Topology((0, 1, 0, 1), (0, 1, 0, 1))), "ranks are dealt out"


def test_policies_know_what_is_sent() -> None:
    model = LoadModel(CostModel(hidden=8, expert_hidden=8), top_k=2, topology=NODES)
    held_EW = np.ones((10, WORLD_SIZE))
    home_E = np.array([rank for rank, _ in PLAIN.home_of])
    assert (model._filling(held_EW[None], home_E, 1)[0] == rows_filled(EVERYWHERE, NODES)).all()
