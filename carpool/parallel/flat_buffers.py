"""Flat buffers of parameters, of their shards and of gradients, which `carpool.parallel.replicated` explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.parallel import fsdp
from carpool.parallel.degrees import chunks

# Axes over whose ranks optimizer state is sharded: of non-expert parameters, and of experts. Axes before replicate.
SHARD_AXES = ("fsdp", "efsdp")
# PyTorch 2.13 renames these, and warns about the names of 2.11.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Alignment of whole parameters, in elements, for vectorised kernels.
_ALIGNMENT = 64


@dataclass(eq=False)
class Place:
    """One parameter.

    Attributes:
        owners: modules with this parameter, and its name there; several if it is tied.
        whole: the parameter of the modules. For experts, all those of this rank.
        shard: the parameter of the optimizer, a DTensor.
        gradient: of `shard`, once gradients are reduced; None where the optimizer uses the gradient of `whole`.
    """

    owners: list[tuple[nn.Module, str]]
    whole: nn.Parameter
    shard: nn.Parameter
    gradient: torch.Tensor | None = None


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together: columns `start` to `stop` of the gradients by rank.

    Attributes:
        waiting: for each parameter, in the order of micro-batches, the gradients that are not in the buffer yet.
        came: number of these.
        filled: whether the buffer contains gradients of this step.
        done: whether all gradients of this backward are in the buffer.
        seen: for each parameter, whether it has had a gradient in this step.
    """

    start: int
    stop: int
    places: list[Place] = field(default_factory=list)

    def forget(self) -> None:
        """Reset for a new step."""
        self.seen = [False] * len(self.places)
        self.waiting: list[list[torch.Tensor]] = [[] for _ in self.places]
        self.came, self.filled, self.done = 0, False, False


class FlatBuffers:
    """Flat buffers of parameters of one dtype, of which all or none are trained.

    Args:
        parameters: DTensors with one mesh and alike placements, with their owners: sharded by rows on the axis of
            `SHARD_AXES`, replicated on axes before it. Of what axes after it shard, each rank has its part.
        computed: the dtype of whole parameters.
        reduced: the dtype in which gradients are accumulated and reduced.
        bucket_bytes: largest size of a bucket of several parameters.

    Attributes:
        buckets: in the order of a backward: the last parameters first.
        of_experts: on a mesh with the axis efsdp.
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
        self._side: torch.cuda.Stream | None = None
        self.device, self.of_experts = device, "efsdp" in (mesh.mesh_dim_names or ())
        sharding = shard_axis(first)
        assert sharding is not None
        self.group, self.ranks = mesh.get_group(sharding), mesh.size(sharding)
        self.replica_groups = [mesh.get_group(axis) for axis in range(sharding) if mesh.size(axis) > 1]
        parameters = parameters[::-1]
        sizes = [-(-_rows(p) // self.ranks) * p.shape[1:].numel() for p, _ in parameters]
        self._columns, padded = sum(sizes), [-(-self.ranks * n // _ALIGNMENT) * _ALIGNMENT for n in sizes]
        self._sizes, self._computed = sizes, computed
        self._whole = torch.zeros(sum(padded), dtype=computed, device=device)
        # Of one rank in one dtype, shards are whole.
        self._apart = self.ranks > 1 or first.dtype != computed
        self._shards = torch.zeros(self._columns if self._apart else 0, dtype=first.dtype, device=device)
        if self.trained:
            self._by_rank = torch.zeros(self.ranks * self._columns, dtype=reduced, device=device)
            self._reduced = torch.zeros_like(self._by_rank[: self._columns]) if self.ranks > 1 else self._by_rank
            # Gradients for the optimizer have the dtype of its parameters.
            self._gradients = self._reduced if first.dtype == reduced else self._reduced.to(first.dtype)
        self.buckets = [Bucket(0, 0)]
        self._matrices = []
        offset = 0
        for (parameter, owners), size, padded_size in zip(parameters, sizes, padded, strict=True):
            place = self._place(parameter, owners, offset)
            self._matrices.append(self._whole[offset : offset + self.ranks * size].view(self.ranks, size))
            bucket = self.buckets[-1]
            if bucket.places and (bucket.stop + size - bucket.start) * self.ranks * reduced.itemsize > bucket_bytes:
                bucket = Bucket(bucket.stop, bucket.stop)
                self.buckets.append(bucket)
            bucket.places.append(place)
            bucket.stop += size
            offset += padded_size

    def _place(self, parameter: nn.Parameter, owners: list[tuple[nn.Module, str]], offset: int) -> Place:
        """Create the views of the next parameter, with the values of its shard."""
        assert isinstance(parameter, DTensor)
        start, local = self.buckets[-1].stop, parameter.to_local()
        mine, shape = slice(start, start + local.numel()), torch.Size((_rows(parameter), *parameter.shape[1:]))
        whole = self._whole[offset : offset + shape.numel()].view(shape)
        own = self._shards[mine].view(local.shape) if self._apart else whole
        shard = fsdp.dtensor_like(own.copy_(local.detach()), parameter)
        return Place(
            owners,
            nn.Parameter(whole, requires_grad=self.trained),
            nn.Parameter(shard, requires_grad=self.trained),
            fsdp.dtensor_like(self._gradients[mine].view(local.shape), parameter) if self.trained else None,
        )

    def put(self, bucket: Bucket, gradients: Sequence[torch.Tensor], add: bool) -> None:
        """Write, or with `add` accumulate, the gradients of all parameters of a bucket."""
        width = bucket.stop - bucket.start
        place_WN = self._bucket(bucket).view(self.ranks, width)
        if len(gradients) == 1 and gradients[0].numel() == place_WN.numel() and gradients[0].is_contiguous():
            # As it is: an expert parameter is too large to be copied without need.
            own_WN = gradients[0].view_as(place_WN)
            place_WN.add_(own_WN) if add else place_WN.copy_(own_WN)
        elif add:
            place_WN += torch._chunk_cat(list(gradients), 0, self.ranks, out=torch.empty_like(place_WN))
        else:
            torch._chunk_cat(list(gradients), 0, self.ranks, out=place_WN)

    def put_waiting(self, bucket: Bucket) -> None:
        """Accumulate all waiting gradients, micro-batch after micro-batch."""
        for number in range(max(map(len, bucket.waiting))):
            # A parameter that this micro-batch has not used has no gradient.
            gradients = [
                one[number] if number < len(one) else torch.zeros_like(place.whole)
                for one, place in zip(bucket.waiting, bucket.places, strict=True)
            ]
            self.put(bucket, gradients, add=bucket.filled)
            bucket.filled = True
        bucket.seen = [seen or bool(one) for seen, one in zip(bucket.seen, bucket.waiting, strict=True)]
        bucket.waiting = [[] for _ in bucket.waiting]
        bucket.came, bucket.done = 0, True

    def reduce(self, bucket: Bucket) -> dist.Work | None:
        """Start to reduce a bucket over the ranks, and then over data-parallel replicas (HSDP)."""
        mine, work = self._reduced[bucket.start : bucket.stop], None
        if self.ranks > 1:
            work = _reduce_scatter(mine, self._bucket(bucket), group=self.group, async_op=True)
        if not self.replica_groups:
            return work
        with self._beside():
            for group in self.replica_groups:
                if work is not None:
                    work.wait()
                work = dist.all_reduce(mine, group=group, async_op=True)
        return work

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Inside, what waits for a reduction is not the computation."""
        if self.device.type != "cuda":
            yield
            return
        self._side = self._side or torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Wait, on the device, for what `reduce` has put on a stream of its own."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def finish(self) -> None:
        """After all buckets are reduced: cast to the shards' dtype."""
        if self._gradients is not self._reduced:
            self._gradients.copy_(self._reduced)

    def gather(self) -> None:
        """Write the whole parameters from the shards of all ranks, in place. Overwrites gradients by rank."""
        if not self._apart:
            return
        mine = self._shards.to(self._computed)
        if self.ranks > 1:
            size = self.ranks * self._columns
            arrived = self._by_rank.view(self._computed)[:size] if self.trained else self._whole.new_empty(size)
            _all_gather(arrived, mine, group=self.group)
            mine = arrived
        rows_WN = mine.view(self.ranks, self._columns)
        torch.split_with_sizes_copy(rows_WN, self._sizes, dim=1, out=self._matrices)

    @torch.no_grad()
    def gather_bucket(self, bucket: Bucket) -> None:
        """As `gather`, of the parameters of one bucket. Autograd is not told, which has saved others of the buffers."""
        if not self._apart:
            return
        mine, places = self._shards[bucket.start : bucket.stop].to(self._computed), bucket.places
        if len(places) == 1 and places[0].whole.numel() == self.ranks * len(mine):
            # Ranks have equally many rows, which come in order.
            whole = places[0].whole.data.view(-1)
            _all_gather(whole, mine, group=self.group) if self.ranks > 1 else whole.copy_(mine)
            return
        size, first = self.ranks * len(mine), sum(len(one.places) for one in self.buckets[: self.buckets.index(bucket)])
        arrived = mine
        if self.ranks > 1:
            arrived = self._bucket(bucket).view(self._computed)[:size]
            _all_gather(arrived, mine, group=self.group)
        these = slice(first, first + len(places))
        out = [matrix.data for matrix in self._matrices[these]]
        torch.split_with_sizes_copy(arrived.view(self.ranks, -1), self._sizes[these], dim=1, out=out)

    def _bucket(self, bucket: Bucket) -> torch.Tensor:
        return self._by_rank[self.ranks * bucket.start : self.ranks * bucket.stop]


def shard_axis(parameter: DTensor) -> int | None:
    """The axis of its mesh over which optimizer state is sharded; None: there is none."""
    axes = parameter.device_mesh.mesh_dim_names or ()
    return next((axes.index(axis) for axis in SHARD_AXES if axis in axes), None)


def _rows(parameter: nn.Parameter) -> int:
    """Of a whole parameter: those that this rank has of axes after that of `SHARD_AXES`."""
    assert isinstance(parameter, DTensor)
    mesh, axis, rows = parameter.device_mesh, shard_axis(parameter), parameter.shape[0]
    assert axis is not None
    for later in range(axis + 1, mesh.ndim):
        rows = chunks(rows, mesh.size(later))[mesh.get_local_rank(later)]
    return rows
