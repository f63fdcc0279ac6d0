"""Process groups and device meshes of a run, made once from its degrees.

A process group consists of ranks that differ along some axes only; a device mesh is a grid of ranks with a group for
each of its dimensions. All communication along an axis uses the groups made here:

    meshes = Meshes(degrees, "cuda")
    meshes.group("cp")                      # this rank's context-parallel group, None if it is alone in it
    meshes.group("fsdp", "cp")              # the ranks along two axes, as one group
    meshes.mesh(fsdp=("fsdp", "cp"), tp=("tp",))
    meshes.stage                            # the meshes over which transformers shards a pipeline stage

The first use of a group creates it, which is collective over all ranks of the run: the order must be the same on all.
Dimensions of size 1 share one group of this rank alone.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from carpool.parallel.degrees import NON_EXPERT_AXES, Degrees
from carpool.transport.nodes import timeout_of


class Meshes:
    """The groups and meshes of this rank.

    Args:
        degrees: of the run; their product is the number of ranks.
        device_type: "cuda" or "cpu".
    """

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        ranks = dist.get_world_size()
        assert degrees.world_size == ranks, f"{degrees} are of {degrees.world_size} ranks, and {ranks} run"
        self.degrees, self.device_type, self.rank = degrees, device_type, dist.get_rank()
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of this rank along axes of one mesh; None if it is alone."""
        long = tuple(axis for axis in axes if self.degrees.size(axis) > 1)
        return self._group(long) if long else None

    def stage_group(self) -> dist.ProcessGroup:
        """The group of ranks with the same pipeline stages as this one, also if it is alone."""
        axes = (axis for axis in NON_EXPERT_AXES if axis != "pp" and self.degrees.size(axis) > 1)
        return self._group(tuple(axes))

    def mesh(self, **dims: tuple[str, ...]) -> DeviceMesh:
        """A mesh of this rank and the ranks that differ from it along the given axes.

        Args:
            dims: for each dimension by name, its axes; the first dimension is the slowest. One without axes has size 1.
        """
        groups = [self._group(tuple(axis for axis in axes if self.degrees.size(axis) > 1)) for axes in dims.values()]
        offsets = []
        for axes in dims.values():
            ranks = self.degrees.ranks_along(self.rank, *axes)
            offsets.append([rank - self.rank for rank in ranks])
        grid = [self.rank + sum(steps) for steps in product(*offsets)]
        shape = [len(steps) for steps in offsets]
        return DeviceMesh.from_group(
            groups, self.device_type, torch.tensor(grid, dtype=torch.int).view(shape), mesh_dim_names=tuple(dims)
        )

    @cached_property
    def stage(self) -> StageMeshes:
        """The meshes of this rank's stage of the pipeline."""
        return StageMeshes(
            self.mesh(pp=(), dp_replicate=("dp_replicate",), fsdp=("fsdp", "cp"), tp=("tp",)),
            self.mesh(pp=(), dp_replicate=("dp_replicate",), efsdp=("efsdp",), ep=("ep", "etp")),
        )

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        if axes not in self._groups:
            parts = dict.fromkeys(self.degrees.ranks_along(rank, *axes) for rank in range(self.degrees.world_size))
            self._groups[axes] = make_group(tuple(parts), "_".join(axes) or "alone")
        return self._groups[axes]


class StageMeshes:
    """Implements transformers' `TransformersDeviceMesh` for the ranks of one pipeline stage.

    Non-expert parameters have the mesh (pp, dp_replicate, fsdp, tp), with pp of size 1, because transformers shards one
    stage at a time. Context-parallel ranks shard parameters like ranks with sequences of their own, so they are part of
    fsdp. Experts have the mesh (pp, dp_replicate, efsdp, ep), where ep includes etp, because slices of experts are
    sharded like experts (carpool/hf/sharding.py).
    """

    def __init__(self, non_experts: DeviceMesh, experts: DeviceMesh) -> None:
        self.non_experts, self.experts = non_experts, experts

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """The submesh with these dimensions: of the experts' mesh if one is efsdp or ep, else of the other mesh."""
        dims = (dims,) if isinstance(dims, str) else dims
        return (self.experts if {"efsdp", "ep"} & set(dims) else self.non_experts)[dims]


def make_group(parts: tuple[tuple[int, ...], ...], name: str) -> dist.ProcessGroup:
    """The process group of this rank's part in a partition of all ranks. Collective over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    if len(parts) == 1:
        return world
    made: dist.ProcessGroup | None = None
    limit = timeout_of(world)
    if getattr(world, "bound_device_id", None) is not None:
        # One call instead of one for each part, and NCCL reuses its connections.
        made = dist.split_group(world, [list(part) for part in parts], group_desc=f"mesh_{name}", timeout=limit)
    else:
        rank = dist.get_rank()
        for part in parts:
            group = dist.new_group(list(part), limit, group_desc=f"mesh_{name}")
            made = group if rank in part else made
    assert made is not None
    return made
