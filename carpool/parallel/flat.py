"""Whole parameters in one buffer, shards of them in another, and the two collectives between them.

Used by `carpool.parallel.replicated`, which says what for. FSDP2's `Shard(0)` gives rank r of W the rows
[r * c, (r + 1) * c) of a parameter of n rows, c = ceil(n / W); the last ranks may have fewer, or none. So a parameter
that is padded to W * c rows is a matrix with one row for each rank, and all parameters side by side are one:

    a (3, 2) and b (4,) on 2 ranks    whole      a0 a0 a1 a1 a2 a2 .. ..   b0 b1 b2 b3     each parameter in one piece
                                      by rank    a0 a0 a1 a1 b0 b1                         row 0
                                                 a2 a2 .. .. b2 b3                         row 1

A reduce-scatter takes gradients by rank and leaves this rank's row; an all-gather of shards gives parameters by rank.
`torch._chunk_cat` and `split_with_sizes_copy`, with which FSDP2 does the same, go from one form to the other and change
the dtype on the way, each in one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.parallel.fsdp import dtensor_like

# PyTorch 2.13 renames them, and warns of the names that 2.11 has.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Whole parameters begin at multiples of so many elements, because kernels want round addresses.
_ALIGNMENT = 64


@dataclass(eq=False)
class Place:
    """One parameter.

    Attributes:
        owners: the modules that have it, and its name there; several if it is tied.
        whole: what modules compute with. Of experts, all rows of this rank.
        shard: what the optimizer updates, a DTensor.
        gradient: of `shard`, once gradients are reduced; None where the optimizer takes that of `whole`.
    """

    owners: list[tuple[nn.Module, str]]
    whole: nn.Parameter
    shard: nn.Parameter
    gradient: torch.Tensor | None = None


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together: columns `start` to `stop` of the gradients by rank."""

    start: int
    stop: int
    places: list[Place] = field(default_factory=list)


class FlatBuffers:
    """The buffers of parameters that are alike: stored in one dtype, trained all or none.

    Args:
        parameters: DTensors, each `Shard(0)` on the last axis of one mesh and copied on the others, with their owners.
        computed: the dtype of whole parameters.
        reduced: the dtype in which gradients are added.
        bucket_bytes: gradients that are reduced together, at most; a larger parameter is alone.

    Attributes:
        buckets: in the order in which a backward needs them: the last parameters first.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, list[tuple[nn.Module, str]]]],
        computed: torch.dtype,
        reduced: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        first = parameters[0][0]
        assert isinstance(first, DTensor)
        mesh, device, self.trained = first.device_mesh, first.device, first.requires_grad
        self.group, self.ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.copies = [mesh.get_group(axis) for axis in range(mesh.ndim - 1) if mesh.size(axis) > 1]
        parameters = parameters[::-1]
        sizes = [-(-p.shape[0] // self.ranks) * p.shape[1:].numel() for p, _ in parameters]
        self._columns, padded = sum(sizes), [-(-self.ranks * n // _ALIGNMENT) * _ALIGNMENT for n in sizes]
        self._sizes, self._computed = sizes, computed
        self._whole = torch.zeros(sum(padded), dtype=computed, device=device)
        self._shards = torch.zeros(self._columns, dtype=first.dtype, device=device)
        if self.trained:
            self._by_rank = torch.zeros(self.ranks * self._columns, dtype=reduced, device=device)
            self._sums = torch.zeros(self._columns, dtype=reduced, device=device)
            # An optimizer wants gradients in the dtype of its parameters.
            self._gradients = self._sums if first.dtype == reduced else torch.zeros_like(self._shards)
        self.buckets = [Bucket(0, 0)]
        self._matrices = []
        offset = 0
        for (parameter, owners), size, room in zip(parameters, sizes, padded, strict=True):
            place = self._place(parameter, owners, offset)
            self._matrices.append(self._whole[offset : offset + self.ranks * size].view(self.ranks, size))
            bucket = self.buckets[-1]
            if bucket.places and (bucket.stop + size - bucket.start) * self.ranks * reduced.itemsize > bucket_bytes:
                bucket = Bucket(bucket.stop, bucket.stop)
                self.buckets.append(bucket)
            bucket.places.append(place)
            bucket.stop += size
            offset += room

    def _place(self, parameter: nn.Parameter, owners: list[tuple[nn.Module, str]], offset: int) -> Place:
        """The views of one parameter, the next one; its shard keeps its values."""
        assert isinstance(parameter, DTensor)
        start, local = self.buckets[-1].stop, parameter.to_local()
        mine = slice(start, start + local.numel())
        shard = dtensor_like(self._shards[mine].view(local.shape).copy_(local.detach()), parameter)
        whole = self._whole[offset : offset + parameter.numel()].view(parameter.shape)
        return Place(
            owners,
            nn.Parameter(whole, requires_grad=self.trained),
            nn.Parameter(shard, requires_grad=self.trained),
            dtensor_like(self._gradients[mine].view(local.shape), parameter) if self.trained else None,
        )

    def put(self, bucket: Bucket, gradients: Sequence[torch.Tensor], add: bool) -> None:
        """Gradients of all parameters of a bucket; `add`: to those that are there already."""
        width = bucket.stop - bucket.start
        place_WN = self._bucket(bucket).view(self.ranks, width)
        if add:
            place_WN += torch._chunk_cat(list(gradients), 0, self.ranks, out=torch.empty_like(place_WN))
        else:
            torch._chunk_cat(list(gradients), 0, self.ranks, out=place_WN)

    def reduce(self, bucket: Bucket) -> dist.Work | None:
        """Begin to sum a bucket over the ranks."""
        mine = self._sums[bucket.start : bucket.stop]
        if self.ranks > 1:
            work: dist.Work = _reduce_scatter(mine, self._bucket(bucket), group=self.group, async_op=True)
            return work
        mine.copy_(self._bucket(bucket))
        return None

    def finish(self) -> None:
        """What comes when all buckets are reduced: sums over copies of the model (HSDP), and the shards' dtype."""
        for group in self.copies:
            dist.all_reduce(self._sums, group=group)
        if self._gradients is not self._sums:
            self._gradients.copy_(self._sums)

    def gather(self) -> None:
        """Write the whole parameters from the shards of all ranks, in place. Gradients by rank are lost."""
        mine = self._shards.to(self._computed)
        if self.ranks > 1:
            size = self.ranks * self._columns
            arrived = self._by_rank.view(self._computed)[:size] if self.trained else self._whole.new_empty(size)
            _all_gather(arrived, mine, group=self.group)
            mine = arrived
        rows_WN = mine.view(self.ranks, self._columns)
        torch.split_with_sizes_copy(rows_WN, self._sizes, dim=1, out=self._matrices)

    def _bucket(self, bucket: Bucket) -> torch.Tensor:
        return self._by_rank[self.ranks * bucket.start : self.ranks * bucket.stop]
