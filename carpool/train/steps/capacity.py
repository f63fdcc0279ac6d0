"""The capacity of a transport's buffers in a run, which grows when a step needs more.

By default a slab of nvlink has a place for each token of its sender, and no routing can overflow. A smaller
`nvlink.capacity` saves memory, and then a step may not fit: outputs are NaN, and every rank has counted how much would
have been enough.

    step 7, slabs of 512 tokens:  forward, backward -> 700 were needed
    gradients thrown away, slabs of 1024 tokens, random state of before step 7
    step 7 again, on the same batches:  forward, backward -> all had a place -> optimizer

The same holds for the arena in which layers save what their backward needs: it starts small, and after the first step
it has the size that this step would have taken, and a quarter more. And for the tokens that hierarchical sends to each
other node, which become fewer, too, where steps need fewer (`carpool.transport.token_capacity`). And for the choices
that a rank serves with spare slots, where a plan exceeds their limit. The host looks once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from carpool.activations import Arena
from carpool.planner.step.sizes import ARENA_ROOM
from carpool.transport.nvlink import Buffers
from carpool.transport.token_capacity import GROWN, NodeCapacity, PairCapacity, TokenCapacity

RandomState = tuple[torch.Tensor, torch.Tensor | None]


class Made(NamedTuple):
    """Capacities after they have grown: tokens of a slab, bytes of the largest arena that has grown (0: none), tokens
    to each other node, and choices of a rank with spare slots. None: the transport has no such thing."""

    capacity: int | None
    arena_bytes: int
    node_rows: int | None
    pairs: int | None


def grow_if_short(
    capacities: Sequence[TokenCapacity], device: torch.device, before: Callable[[], None] = lambda: None
) -> Made | None:
    """If tokens had no place since the last call, enlarge what was too small, on all ranks.

    Collective over all ranks of the run: they decide alike, also where only one of several expert-parallel groups
    overflowed. Waits for the device. `before` is called before anything grows.

    Returns:
        The new sizes: what was computed since the last call is void. None: all tokens had a place.
    """
    buffers, nodes, pairs = _kinds(capacities)
    # Arenas serve the same layers on all ranks, so there are equally many.
    arenas = [arena for one in buffers for arena in one.arenas]
    if not arenas and not nodes and not pairs and all(one.capacity >= one.most for one in buffers):
        return None
    asked: list[TokenCapacity | Arena] = [*capacities, *arenas]
    needs = torch.cat([one.needed.to(device, torch.int64) for one in asked])
    if dist.is_initialized():
        # Afterwards all ranks have come here, so nobody reads any more what is about to be freed.
        dist.all_reduce(needs, op=dist.ReduceOp.MAX)
    needed_by = dict(zip(map(id, asked), needs.tolist(), strict=True))
    short = {id(one): needed_by[id(one)] for one in asked if needed_by[id(one)] > one.capacity}
    for node in nodes:
        node.agreed = needed_by[id(node)]
    if not short:
        return None
    before()
    # Those of several stages or groups grow alike.
    if needed := max((short.get(id(one), 0) for one in buffers), default=0):
        for one in buffers:
            # Powers of two: few repetitions until it fits.
            one.grow(max(needed, min(one.most, 1 << (needed - 1).bit_length())))
    if needed := max((short.get(id(one), 0) for one in nodes), default=0):
        for node in nodes:
            # Loads change from step to step, also below.
            node.grow(math.ceil(GROWN * needed))
    if needed := max((short.get(id(one), 0) for one in pairs), default=0):
        for ride in pairs:
            ride.grow(min(ride.most, math.ceil(GROWN * needed)))
    grown = [int(ARENA_ROOM * short[id(one)]) for one in arenas if id(one) in short]
    for arena, size in zip((one for one in arenas if id(one) in short), grown, strict=True):
        arena.grow(size)
    of_slabs, of_nodes, of_pairs = (some[0].capacity if some else None for some in (buffers, nodes, pairs))
    return Made(of_slabs, max(grown, default=0), of_nodes, of_pairs)


def fewer_node_tokens(capacities: Sequence[TokenCapacity]) -> int | None:
    """After a step whose tokens all had a place: how many travel to each other node from now on, if they become fewer.
    The same on all ranks."""
    return max((one.capacity for one in _kinds(capacities)[1] if one.fit(one.agreed)), default=None)


@contextmanager
def full_capacity(capacities: Sequence[TokenCapacity]) -> Iterator[None]:
    """Inside, tokens for other nodes are counted, and experts allocate for any routing. For evaluations: a sample
    cannot be drawn from NaN and repeated, and their batches are of another size than a step's."""
    _, nodes, pairs = _kinds(capacities)
    changed: list[NodeCapacity | PairCapacity] = [*nodes, *pairs]
    for one in changed:
        one.whole = True
    try:
        yield
    finally:
        for one in changed:
            one.whole = False


def _kinds(
    capacities: Sequence[TokenCapacity],
) -> tuple[list[Buffers], list[NodeCapacity], list[PairCapacity]]:
    buffers = [one for one in capacities if isinstance(one, Buffers)]
    nodes = [one for one in capacities if isinstance(one, NodeCapacity)]
    return buffers, nodes, [one for one in capacities if isinstance(one, PairCapacity)]


def random_state(device: torch.device) -> RandomState:
    """Of the default generators of this process: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
