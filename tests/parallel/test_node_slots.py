"""Filling slots over two hops: an expert that several ranks of a node replicate crosses to it once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from carpool import ExpertLayout
from carpool.layout.topology import Topology
from carpool.placement.policies import LoadModel
from carpool.planner.machine.cost import CostModel
from carpool.replicas.node_slots import NodeSlotFiller, crosses_once, make_filler, rows_filled
from carpool.replicas.slots import SlotFiller
from tests.ranks import WORLD_SIZE, Ranks, mesh

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
        slots = filler.fill(home)
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
