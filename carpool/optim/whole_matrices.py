"""Whole matrices for those who have shards of them: which rank gets which matrix, and the messages there and back.

FSDP and ZeRO-1 give each rank some rows of a matrix, tensor parallelism some rows or columns, expert tensor parallelism
slices of experts; data-parallel replicas have the same. An update that looks at whole matrices then takes

    take            each rank puts its gradients into its momentum
    all-to-all      shards go to the matrix's owner, each element once
    orthogonalise   each owner its matrices: nobody does the work of another
    all-to-all      the result goes to all ranks that have a part of the matrix
    change          each rank changes its part

Owners are ranks that have a part of the matrix, so nothing goes through others. Matrices are dealt out by their cost,
the most costly first, each to the rank with the least work so far, of which the rank's own matrices are counted first.
Those of a stack whose experts several ranks have in common are dealt out in as many runs of experts as there are ranks.

    4 ranks, FSDP, q and k of one shape, and a gate of half the cost:    q -> rank 0    k -> rank 1    gate -> rank 2

Ranks tell each other once what they have, so that no rule of placement is repeated here, and all come to the same
plan. Messages go in rounds, so that a rank has at most about `ROUND` elements of them at a time. What a rank has whole
and alone is never sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from carpool.optim.base import Matrices, MuonFacts
from carpool.parallel.ranks import gather

ROUND = 2**28

# Places along a dimension, as runs: (first, stop) of each.
Runs = tuple[tuple[int, int], ...]


class Shape(NamedTuple):
    """Of what is whole: rows, columns, and as `Matrices` has them the halves of it."""

    rows: int
    columns: int
    halves: int = 0
    interleaved: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of what is orthogonalised by itself."""
        return self.rows // (1 + (self.halves == 1)), self.columns // (1 + (self.halves == 2))

    @property
    def cost(self) -> float:
        return MuonFacts.update_flops(*self.matrix) * (2 if self.halves else 1)


class Part(NamedTuple):
    """What a rank has of a parameter.

    Attributes:
        shape: of the whole of an expert, or of the parameter.
        experts: which of them, in the order in which it has them.
        rows, columns: which of each.
    """

    shape: Shape
    experts: Runs
    rows: Runs
    columns: Runs


@dataclass
class _Item:
    """Matrices that one rank orthogonalises.

    Attributes:
        first, stop: their places among those that each holder has.
        holders: what each has of each matrix: rows and columns.
        senders: holders that together have each element once.
    """

    name: str
    shape: Shape
    first: int
    stop: int
    holders: dict[int, tuple[Runs, Runs]]
    owner: int = -1
    round: int = 0
    senders: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.stop - self.first

    def size(self, rank: int) -> tuple[int, int, int]:
        """Of what a holder has."""
        rows, columns = self.holders[rank]
        return self.count, _length(rows), _length(columns)

    def tiles(self, rank: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(places in the wholes, places in what a holder has) of its rectangles."""
        for whole_rows, rows in _slices(self.holders[rank][0]):
            for whole_columns, columns in _slices(self.holders[rank][1]):
                yield (slice(None), whole_rows, whole_columns), (slice(None), rows, columns)


# Of a message: whose part it is, of what, and the memory.
_Message = tuple[int, _Item, torch.Tensor]


def parts_of(parameter: DTensor, of: Matrices) -> Part | None:
    """What this rank has of a sharded parameter; None: nothing."""
    held = [_held(parameter, dim) for dim in range(parameter.dim())]
    if not all(held):
        return None
    experts, (rows, columns) = (held[0], held[1:]) if of.stacked else ([0], held)
    sizes = list(parameter.shape[-2:])
    if of.slices > 1:
        named = [of.order[row] for row in experts]
        experts = [name // of.slices for name in named]
        (own,) = {name % of.slices for name in named}  # a rank has the same slice of each of its experts
        # Gate and up are cut each; of rows that alternate a slice has pairs.
        halves, size = 2 if of.halves == of.cut and not of.interleaved else 1, sizes[of.cut - 1]
        sizes[of.cut - 1] = size * of.slices
        width = size // halves
        starts = [half * width * of.slices + own * width for half in range(halves)]
        cut = [place for start in starts for place in range(start, start + width)]
        rows, columns = (cut, columns) if of.cut == 1 else (rows, cut)
    shape = Shape(sizes[0], sizes[1], of.halves, of.interleaved)
    return Part(shape, _runs(experts), _runs(rows), _runs(columns))


def _held(parameter: DTensor, dim: int) -> list[int]:
    """The places along a dimension that this rank has, found by sharding their numbers alike."""
    mesh = parameter.device_mesh
    alike: list[Placement] = []
    for placement in parameter.placements:
        if getattr(placement, "dim", None) != dim:
            alike.append(Replicate())
        elif isinstance(placement, _StridedShard):
            alike.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            alike.append(Shard(0))
    numbers = torch.arange(parameter.shape[dim], device=mesh.device_type)
    found: list[int] = distribute_tensor(numbers, mesh, alike, src_data_rank=None).to_local().tolist()
    return found


def _runs(places: list[int]) -> Runs:
    begins = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return tuple((places[i], places[j - 1] + 1) for i, j in zip(begins, [*begins[1:], len(places)], strict=True))


def _length(runs: Runs) -> int:
    return sum(stop - first for first, stop in runs)


def _slices(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """(places in the whole, places in the part) of each run."""
    at = 0
    for first, stop in runs:
        yield slice(first, stop), slice(at, at + stop - first)
        at += stop - first


class Exchange:
    """The plan and the messages of this rank. Made by all ranks together.

    Args:
        parts: what this rank has, by the names of parameters.
        dtype: of messages.
        ranks: of the world; 1: nothing is shared.

    Attributes:
        shared: names of parameters that this rank has not alone, or not whole.
    """

    def __init__(self, parts: Mapping[str, Part], dtype: torch.dtype, device: torch.device, ranks: int) -> None:
        self.dtype, self.device, self.ranks = dtype, device, ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.items = _plan(gather(dict(parts)) if ranks > 1 else [parts])
        self.shared = {item.name for item in self.items if self.rank in item.holders}
        self.rounds = [
            [item for item in self.items if item.round == number]
            for number in range(1 + max((item.round for item in self.items), default=-1))
        ]

    def run(
        self,
        take: Callable[[str, int, int, torch.Tensor], None],
        orthogonal: Callable[[Shape, torch.Tensor], torch.Tensor],
        change: Callable[[str, int, int, torch.Tensor, Shape], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """A step of all shared matrices. All ranks together.

        Args:
            take: (name, first, stop, out) writes what this rank has of some matrices.
            orthogonal: (shape, whole matrices) -> the results.
            change: (name, first, stop, result, shape) uses what this rank has of the results.
            meanwhile: is called while the first messages travel.
        """
        coming = self._gather(self.rounds[0], take) if self.rounds else None
        meanwhile()
        for number, items in enumerate(self.rounds):
            assert coming is not None
            arrived, work = coming
            work.wait()
            if number + 1 < len(self.rounds):
                coming = self._gather(self.rounds[number + 1], take)
            self._scatter(items, self._orthogonalise(items, arrived, orthogonal), change)

    def _gather(
        self, items: list[_Item], take: Callable[[str, int, int, torch.Tensor], None]
    ) -> tuple[list[_Message], dist.Work]:
        """Send this rank's parts to the owners. Returns what arrives."""
        mine = [item for item in items if item.owner == self.rank]
        sent = [(item.owner, self.rank, item) for item in _by_owner(items) if self.rank in item.senders]
        leaving, out, messages = self._buffer(sent)
        there = {id(item): part for _, item, part in messages}
        for item in items:
            if self.rank in item.holders:
                part = there.get(id(item))
                if part is None:  # another replica sends it, and the momentum here needs its gradient too
                    part = torch.empty(item.size(self.rank), dtype=self.dtype, device=self.device)
                take(item.name, item.first, item.stop, part)
        come = [(rank, rank, item) for rank in range(self.ranks) for item in mine if rank in item.senders]
        arriving, sizes, arrived = self._buffer(come)
        work = dist.all_to_all_single(arriving, leaving, sizes, out, async_op=True)
        assert work is not None
        return arrived, work

    def _orthogonalise(
        self, items: list[_Item], arrived: list[_Message], orthogonal: Callable[[Shape, torch.Tensor], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The results of the items that this rank owns, by their ids; those of one shape as one batch."""
        found: dict[int, torch.Tensor] = {}
        mine = [item for item in items if item.owner == self.rank]
        for shape in dict.fromkeys(item.shape for item in mine):
            some = [item for item in mine if item.shape == shape]
            counts = [item.count for item in some]
            batch = torch.empty(sum(counts), shape.rows, shape.columns, dtype=self.dtype, device=self.device)
            wholes = dict(zip(map(id, some), batch.split(counts), strict=True))
            for rank, item, part in arrived:
                if item.shape == shape:
                    for place, own in item.tiles(rank):
                        wholes[id(item)][place] = part[own]
            found |= dict(zip(map(id, some), orthogonal(shape, batch).split(counts), strict=True))
        return found

    def _scatter(
        self,
        items: list[_Item],
        found: dict[int, torch.Tensor],
        change: Callable[[str, int, int, torch.Tensor, Shape], None],
    ) -> None:
        """Send results to all holders, and use those that arrive."""
        ranks = range(self.ranks)
        leaving, out, messages = self._buffer(
            [(to, to, item) for to in ranks for item in items if id(item) in found and to in item.holders]
        )
        for to, item, part in messages:
            for place, own in item.tiles(to):
                part[own] = found[id(item)][place]
        arriving, sizes, arrived = self._buffer(
            [(item.owner, self.rank, item) for item in _by_owner(items) if self.rank in item.holders]
        )
        dist.all_to_all_single(arriving, leaving, sizes, out)
        for _, item, part in arrived:
            change(item.name, item.first, item.stop, part, item.shape)

    def _buffer(self, messages: list[tuple[int, int, _Item]]) -> tuple[torch.Tensor, list[int], list[_Message]]:
        """Memory of messages in the order of peers: (peer, rank whose part it is, item). Returns all of it, how many
        elements go to or come from each peer, and each message."""
        sizes, splits = [item.size(rank) for _, rank, item in messages], [0] * self.ranks
        for (peer, *_), size in zip(messages, sizes, strict=True):
            splits[peer] += math.prod(size)
        memory = torch.empty(sum(splits), dtype=self.dtype, device=self.device)
        parts = memory.split([math.prod(size) for size in sizes])
        shown = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        return memory, splits, [(rank, item, part) for (_, rank, item), part in zip(messages, shown, strict=True)]


def _by_owner(items: list[_Item]) -> list[_Item]:
    return sorted(items, key=lambda item: item.owner)


def _plan(everyone: list[Mapping[str, Part]]) -> list[_Item]:
    """Items of what ranks share, with owners, senders and rounds; the same on every rank."""
    holders: dict[tuple[str, Runs], dict[int, Part]] = {}
    for rank, parts in enumerate(everyone):
        for name, part in parts.items():
            holders.setdefault((name, part.experts), {})[rank] = part
    load, items = [0.0] * len(everyone), list[_Item]()
    for (name, experts), held in holders.items():
        (shape,), count = {part.shape for part in held.values()}, _length(experts)
        if len(held) == 1:
            ((rank, part),) = held.items()
            assert (_length(part.rows), _length(part.columns)) == shape[:2], f"{name} is not there as a whole"
            load[rank] += count * shape.cost
            continue
        runs = min(len(held), count)
        ends = [count * (i + 1) // runs for i in range(runs)]
        of = {rank: (part.rows, part.columns) for rank, part in held.items()}
        items += [_Item(name, shape, first, stop, of) for first, stop in zip([0, *ends], ends, strict=False)]
    # Equal costs in the order of names, so that the plan is the same for the same model.
    for item in sorted(items, key=lambda item: (-item.count * item.shape.cost, item.name, item.first)):
        item.owner = min(item.holders, key=lambda rank: (load[rank], rank))
        load[item.owner] += item.count * item.shape.cost
        item.senders = _senders(item, len(everyone))
    _set_rounds(items, len(everyone))
    return items


def _senders(item: _Item, ranks: int) -> list[int]:
    """Of holders of the same part, the nearest to the owner."""
    nearest: dict[tuple[Runs, Runs], int] = {}
    for rank in sorted(item.holders, key=lambda rank: (rank - item.owner) % ranks):
        nearest.setdefault(item.holders[rank], rank)
    elements = sum(math.prod(item.size(rank)) for rank in nearest.values())
    assert elements == item.count * item.shape.rows * item.shape.columns, f"{item.name} is not there as a whole"
    return sorted(nearest.values())


def _set_rounds(items: list[_Item], ranks: int) -> None:
    """Rounds in which no rank has many more than `ROUND` elements of messages."""
    total = [0] * ranks
    for item in items:
        for rank in item.holders:
            total[rank] += math.prod(item.size(rank))
        total[item.owner] += item.count * item.shape.rows * item.shape.columns
        item.round = max(total[rank] // ROUND for rank in item.holders)
