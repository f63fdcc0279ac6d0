"""Many sharded tensors made whole with one message: `DTensor.full_tensor` takes milliseconds for each, and a model has
dozens.

Each rank sends its shards as bytes, one behind the other. Where a rank's shard lies in the whole follows from the
placements, so nothing else has to travel. For example, 5 rows over 4 ranks, `[Shard(0)]`: rows 0-1, 2-3, 4 and none.
Over a mesh of 2 x 2, `[Replicate(), Shard(0)]`: rows 0-2 and 3-4, and each rank takes those of its own copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

_ALIGN = 16


class _Piece(NamedTuple):
    """Of one rank. own: of the copy that this rank belongs to."""

    place: tuple[slice, ...]
    shape: tuple[int, ...]
    own: bool

    def bytes(self, itemsize: int) -> int:
        return -(-math.prod(self.shape) * itemsize // _ALIGN) * _ALIGN


@functools.cache
def _pieces(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[_Piece]:
    """By rank."""
    here = mesh.get_coordinate()
    assert here is not None
    found = []
    for rank in range(dist.get_world_size()):
        (coordinate,) = (mesh.mesh == rank).nonzero().tolist()
        offsets, sizes, own = [0] * len(shape), list(shape), True
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim, each = placement.dim, -(-sizes[placement.dim] // mesh.size(axis))
                skipped = min(each * coordinate[axis], sizes[dim])
                offsets[dim], sizes[dim] = offsets[dim] + skipped, min(each, sizes[dim] - skipped)
            else:
                own &= coordinate[axis] == here[axis]
        place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        found.append(_Piece(place, tuple(sizes), own))
    return found


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, whole on every rank. Collective. What is not sharded stays as it is."""
    sharded: dict[str, tuple[torch.Tensor, list[_Piece]]] = {}
    result = dict(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        plain = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
        if plain and tensor.device_mesh.size() == dist.get_world_size():
            pieces = _pieces(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
            sharded[name] = tensor.to_local().detach(), pieces
        else:
            result[name] = tensor.full_tensor()
    if not sharded:
        return result

    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [sum(pieces[r].bytes(local.itemsize) for local, pieces in sharded.values()) for r in range(world)]
    device = next(iter(sharded.values()))[0].device
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    at = 0
    for local, pieces in sharded.values():
        assert tuple(local.shape) == pieces[rank].shape
        mine[at : at + local.numel() * local.itemsize] = local.reshape(-1).view(torch.uint8)
        at += pieces[rank].bytes(local.itemsize)
    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine)

    starts = [0] * world
    for name, (local, pieces) in sharded.items():
        result[name] = torch.empty(tensors[name].shape, dtype=local.dtype, device=device)
        for r, piece in enumerate(pieces):
            if piece.own:
                sent = gathered[r][starts[r] : starts[r] + math.prod(piece.shape) * local.itemsize]
                result[name][piece.place] = sent.view(local.dtype).view(piece.shape)
            starts[r] += piece.bytes(local.itemsize)
    return result
