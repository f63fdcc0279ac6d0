"""Process groups and device meshes of a run, made once from its degrees.

A process group joins the ranks that differ along some axes only; a device mesh is a grid of ranks with a group for each
of its dimensions. Everybody who communicates along an axis asks for it here:

    meshes = Meshes(degrees, "cuda")
    meshes.group("cp")                      # this rank's context-parallel group, None if it is alone in it
    meshes.group("fsdp", "cp")              # those along two axes of one line, as one group
    meshes.mesh(fsdp=("fsdp", "cp"), tp=("tp",))
    meshes.stage                            # what transformers shards a stage of the pipeline over

A group is made when it is first asked for, which is a collective over all ranks of the run: all ask in the same order.
Dimensions of one rank share one group of this rank alone.
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
        """The ranks that differ from this one along these axes of one line only; None if there is no other."""
        long = tuple(axis for axis in axes if self.degrees.size(axis) > 1)
        return self._group(long) if long else None

    def stage_group(self) -> dist.ProcessGroup:
        """The ranks that have the same stages of the pipeline as this one, also if it is alone."""
        axes = (axis for axis in NON_EXPERT_AXES if axis != "pp" and self.degrees.size(axis) > 1)
        return self._group(tuple(axes))

    def mesh(self, **dims: tuple[str, ...]) -> DeviceMesh:
        """A mesh of this rank and those that differ from it along the given axes.

        Args:
            dims: the axes of each dimension, by its name; the first dimension is the slowest. One without axes has one
                rank.
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
    """What transformers asks of its `TransformersDeviceMesh`, for the ranks of one stage of a pipeline.

    Non-expert parameters are over (pp, dp_replicate, fsdp, tp), of which pp has one rank: transformers has one stage to
    shard and knows of no other. Ranks that share sequences shard parameters as those with sequences of their own do,
    so context-parallel ranks are among those of fsdp. Experts are over (pp, dp_replicate, efsdp, ep), of which ep has
    the ranks of etp, too: slices of experts are sharded as experts are (carpool/hf/sharding.py).
    """

    def __init__(self, non_experts: DeviceMesh, experts: DeviceMesh) -> None:
        self.non_experts, self.experts = non_experts, experts

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """The part with these dimensions of the experts' mesh, if one is efsdp or ep; else of the other."""
        dims = (dims,) if isinstance(dims, str) else dims
        return (self.experts if {"efsdp", "ep"} & set(dims) else self.non_experts)[dims]


def make_group(parts: tuple[tuple[int, ...], ...], name: str) -> dist.ProcessGroup:
    """The process group of this rank's part, of parts that together are all ranks. Collective over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    if len(parts) == 1:
        return world
    made: dist.ProcessGroup | None = None
    limit = timeout_of(world)
    if getattr(world, "bound_device_id", None) is not None:
        # One call instead of one for each part, and NCCL need not connect anew.
        made = dist.split_group(world, [list(part) for part in parts], group_desc=f"mesh_{name}", timeout=limit)
    else:
        rank = dist.get_rank()
        for part in parts:
            group = dist.new_group(list(part), limit, group_desc=f"mesh_{name}")
            made = group if rank in part else made
    assert made is not None
    return made
