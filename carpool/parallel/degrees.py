"""The degrees of parallelism of a run: over how many ranks each dimension of the work is divided.

    non-expert parameters    pp x dp_replicate x fsdp  x cp x tp     = all ranks
    experts                  pp x dp_replicate x efsdp x ep x etp    = all ranks

Both meshes have the same order of ranks, the last axis fastest. So they agree on pp and dp_replicate, and fold the
other axes: ep and etp may extend over cp, tp and fsdp. `carpool.train.config.schema.ParallelismSection.resolve`
constructs the degrees once. Everything that follows from the sizes (the data of a rank, groups, tokens per rank) is
computed only here.

    8 ranks, tp = 2, ep = 4    ->  fsdp = 4, efsdp = 2, and 4 data-parallel ranks: ranks 0 and 1 see the same tokens

Ranks of unequal speed: a step ends with its slowest rank. If some devices are slower (another generation, throttled,
shared), work is in proportion to speed (HeterMoE, arXiv 2504.03871; HEXA-MoE, arXiv 2411.01288), and all finish at the
same time:

    4 sequences on each of 4 ranks, speeds 1, 1, 0.5, 0.5    5, 5, 3 and 3 sequences
    experts with 60 choices on 2 ranks, speeds 1 and 0.5     a layout is as slow as max(load / speed): 40 and 20

The loss and its gradient are sums over all tokens, divided by all tokens (`carpool.train.steps.training_objective`), so
that the distribution of tokens changes only rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

NON_EXPERT_AXES = ("pp", "dp_replicate", "fsdp", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism.

    Attributes:
        dp_replicate: data-parallel replicas of the sharded model (HSDP).
        fsdp: ranks of a replica that shard its non-expert parameters and have distinct sequences.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks, over which a layer's experts are distributed.
        cp: context-parallel ranks, each with a part of every sequence.
        pp: pipeline stages, each with a part of the layers.
        etp: expert-tensor-parallel ranks, each with a part of F of the same experts.
    """

    dp_replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        assert (self.fsdp * self.cp * self.tp) % (self.ep * self.etp) == 0, f"{self} does not tile its ranks"

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.pp * self.stage_size

    @cached_property
    def stage_size(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.dp_replicate * self.fsdp * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks of one data-parallel replica that shard the same experts."""
        return self.fsdp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def expert_ranks(self) -> int:
        """Ranks of an expert-parallel group, slices of experts included: W of the layout."""
        return self.ep * self.etp

    @property
    def dp(self) -> int:
        """Ranks of a stage with distinct sequences."""
        return self.dp_replicate * self.fsdp

    @property
    def dp_cp(self) -> int:
        """Ranks of a stage with distinct tokens, before tensor-parallel ranks divide theirs."""
        return self.dp * self.cp

    @property
    def non_expert_shards(self) -> int:
        """Ranks that shard a non-expert parameter in one data-parallel replica."""
        return self.fsdp * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks that shard the experts of a layer in one data-parallel replica."""
        return self.etp * self.ep * self.efsdp

    def coordinate(self, rank: int, axis: str) -> int:
        """The coordinate of a rank along an axis (of `NON_EXPERT_AXES` or `EXPERT_AXES`)."""
        return rank // self._stride(axis) % self.size(axis)

    def ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of a rank along axes of one mesh: the ranks that differ from it only in these, in order."""
        found = [rank]
        # The slowest axis first, so that ranks come in order.
        for axis in sorted(axes, key=self._stride, reverse=True):
            stride, place = self._stride(axis), self.coordinate(rank, axis)
            found = [one + (i - place) * stride for one in found for i in range(self.size(axis))]
        return tuple(found)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the independent axes: all but efsdp, which follows from them."""
        return {axis: self.size(axis) for axis in (*NON_EXPERT_AXES, "ep", "etp")}

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        found: int = getattr(self, axis)
        return found

    def _stride(self, axis: str) -> int:
        axes = NON_EXPERT_AXES if axis in NON_EXPERT_AXES else EXPERT_AXES
        return math.prod(self.size(one) for one in axes[axes.index(axis) + 1 :])

    def dp_rank(self, rank: int) -> int:
        """The data-parallel rank: the number of the rank's part of the data."""
        return rank % self.stage_size // (self.cp * self.tp)

    def dp_cp_rank(self, rank: int) -> int:
        """The number of the rank's part of the tokens."""
        return rank % self.stage_size // self.tp

    def tokens_per_rank(self, tokens: int) -> int:
        """The largest number of tokens that a rank routes if its data-parallel rank has `tokens`, which context- and
        tensor-parallel ranks divide."""
        return -(-tokens // (self.cp * self.tp))

    def record(self) -> dict[str, int]:
        """The degrees for run.json, with the names of the configuration and of transformers."""
        names = dict.fromkeys((*NON_EXPERT_AXES, *EXPERT_AXES))
        return {"world_size": self.world_size, **{f"{name}_size": self.size(name) for name in names}}

    def __str__(self) -> str:
        main = f"fsdp {self.fsdp} x tp {self.tp}, experts ep {self.ep} x efsdp {self.efsdp}"
        more = "".join(f", {axis} {self.size(axis)}" for axis in ("cp", "etp", "pp") if self.size(axis) > 1)
        return f"{main}, replicas {self.dp_replicate}{more}"


def chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """The rows per rank in DTensor's sharding: ceil(rows / ranks), and fewer or none on the last ranks."""
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))


def shares(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """`total` in whole parts that are in proportion to speeds (largest remainders, the first of equal ones first), and
    at least 1 each.

    Raises:
        ValueError: there is not one for each."""
    if total < len(speeds):
        raise ValueError(f"{total} cannot be divided over {len(speeds)} ranks with at least one each")
    rest = total - len(speeds)
    # Each has one; what each is to have beyond it.
    exact = [max(0.0, total * speed / sum(speeds) - 1) for speed in speeds]
    exact = [rest * one / (sum(exact) or 1.0) for one in exact]
    found = [math.floor(one + 1e-9) for one in exact]
    order = sorted(range(len(found)), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in order[: rest - sum(found)]:
        found[rank] += 1
    return tuple(1 + one for one in found)


def data_speeds(speeds: Sequence[float], degrees: Degrees) -> tuple[float, ...]:
    """The speed of each data-parallel rank: that of the slowest rank that shares its sequences."""
    found = [math.inf] * degrees.dp
    for rank, speed in enumerate(speeds):
        place = degrees.dp_rank(rank)
        found[place] = min(found[place], speed)
    return tuple(found)
