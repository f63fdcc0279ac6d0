"""Filling slots over two hops: an expert that several ranks of a node replicate crosses to it once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from carpool import ExpertLayout
from carpool.layout.topology import Topology
from carpool.replicas.node_slots import crosses_once, make_fillers
from carpool.replicas.slot_links import _arrive
from carpool.replicas.slots import SlotFiller
from tests.ranks import WORLD_SIZE, Ranks, mesh

NODES = Topology.even(WORLD_SIZE, 2)
HOMES = ExpertLayout.contiguous(10, WORLD_SIZE).homes
EVERYWHERE = tuple((*own, *(e for e in range(10) if e not in own)) for own in HOMES)
SLOTS = {
    "everywhere": EVERYWHERE,
    # Replicas on the home's own node alone, on the other, on both; and an empty slot.
    "some": ((0, 1, 2, 6), (3, 4, 5, 0), (6, 7, -1, 0, 1), (8, 9, 0, 1, 5)),
}
WIDTH = 3


def filled(name: str) -> Any:
    """Over one hop, and over two: slots, the gradients of the homes; and how many experts each hop sends."""
    rank, slots = dist.get_rank(), SLOTS[name]
    group = mesh((1, WORLD_SIZE), ("edp", "ep"))["ep"].get_group()
    generator, found = torch.Generator().manual_seed(rank), []
    device = mesh((1, WORLD_SIZE), ("edp", "ep")).device_type
    home = torch.randn(len(HOMES[rank]), WIDTH, generator=generator).to(device)
    dslots = torch.randn(len(slots[rank]), WIDTH, generator=generator).to(device)
    two = make_fillers(HOMES, slots, group)
    assert len(two) == 2
    for fillers in ((SlotFiller(HOMES, slots, group),), two):
        rows, gradients = _arrive(fillers, home, fillers[0].send_rows(home)), dslots
        for hop in reversed(fillers):
            gradients = hop.homes(gradients, hop.send_gradients(gradients).wait())
        found.append((rows, gradients))
    return *found, [sum(hop.send) for hop in two], [sum(hop.receive) for hop in two]


@pytest.mark.parametrize("name", list(SLOTS))
def test_the_same_with_fewer_sends_between_nodes(name: str, ranks: Ranks) -> None:
    slots, home_E = SLOTS[name], np.repeat(np.arange(WORLD_SIZE), [len(home) for home in HOMES])
    every = ranks(filled, name)
    for rank, ((rows, gradient), (same, close), *_) in enumerate(every):
        real = torch.tensor([e != -1 for e in slots[rank]])
        assert torch.equal(rows[real], same[real])
        torch.testing.assert_close(close, gradient)
    far = [
        (e, NODES.node_of[rank])
        for rank, held in enumerate(slots)
        for e in held
        if e != -1 and NODES.node_of[home_E[e]] != NODES.node_of[rank]
    ]
    crossed = sum(send[0] for *_, send, _ in every)
    assert crossed == len(set(far)) < len(far)
    assert crossed == sum(receive[0] for *_, receive in every), "as many gradients come back"


def test_two_hops_only_where_they_save() -> None:
    assert crosses_once(HOMES, EVERYWHERE, NODES)
    assert not crosses_once(HOMES, EVERYWHERE, None)
    assert not crosses_once(HOMES, EVERYWHERE, Topology.even(WORLD_SIZE))
    one = (*HOMES[:3], (*HOMES[3], 0))
    assert not crosses_once(HOMES, one, NODES), "one rank of the other node wants it"
    assert not crosses_once(HOMES, EVERYWHERE, Topology((0, 1, 0, 1), (0, 1, 0, 1))), "ranks are dealt out"
