"""The degrees of parallelism of a run: over how many ranks each dimension of the work is divided.

    non-expert parameters    pp x dp_replicate x fsdp  x cp x tp     = all ranks
    experts             pp x dp_replicate x efsdp x ep x etp    = all ranks

Both lines are one order of the ranks, the last axis fastest, so they agree on pp and dp_replicate and fold the rest:
ep and etp may spread over cp, tp and fsdp as their sizes ask. Made once, by
`carpool.train.config.schema.ParallelismSection.resolve`. Whatever follows from the sizes (who sees which data, who
shares a group, how many tokens a rank has) is computed here and nowhere else.

    8 ranks, tp = 2, ep = 4    ->  fsdp = 4, efsdp = 2, and 4 data-parallel ranks: ranks 0 and 1 see the same tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

NON_EXPERT_AXES = ("pp", "dp_replicate", "fsdp", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")


@dataclass(frozen=True)
class Degrees:
    """All degrees, as numbers.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP).
        fsdp: ranks that shard the non-expert parameters of a copy and see distinct sequences.
        tp: tensor-parallel ranks.
        ep: ranks over which a layer's experts are spread.
        cp: context-parallel ranks, which share sequences; each has a part of every sequence.
        pp: stages of a pipeline; each has a part of the layers.
        etp: ranks that compute a part of F each of the same experts.
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
        """All ranks."""
        return self.pp * self.stage_size

    @cached_property
    def stage_size(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.dp_replicate * self.fsdp * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks of one copy of the model that hold the same experts, sharded among themselves."""
        return self.fsdp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the rows of a layer travel: W of its layout."""
        return self.ep * self.etp

    @property
    def dp(self) -> int:
        """Ranks of a stage that see distinct sequences."""
        return self.dp_replicate * self.fsdp

    @property
    def dp_cp(self) -> int:
        """Ranks of a stage that see distinct tokens, before tensor-parallel ranks divide theirs."""
        return self.dp * self.cp

    @property
    def non_expert_shards(self) -> int:
        """Ranks among which one copy of a dense parameter is divided."""
        return self.fsdp * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks among which one copy of all experts of a layer is divided."""
        return self.etp * self.ep * self.efsdp

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank is along an axis (`NON_EXPERT_AXES`, `EXPERT_AXES`)."""
        return rank // self._stride(axis) % self.size(axis)

    def ranks_along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these axes of one line only, in order: their group."""
        found = [rank]
        # The slowest axis first, so that ranks come in order.
        for axis in sorted(axes, key=self._stride, reverse=True):
            stride, place = self._stride(axis), self.coordinate(rank, axis)
            found = [one + (i - place) * stride for one in found for i in range(self.size(axis))]
        return tuple(found)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along the axes that are chosen: all but efsdp, which follows from them."""
        return {axis: self.size(axis) for axis in (*NON_EXPERT_AXES, "ep", "etp")}

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        found: int = getattr(self, axis)
        return found

    def _stride(self, axis: str) -> int:
        axes = NON_EXPERT_AXES if axis in NON_EXPERT_AXES else EXPERT_AXES
        return math.prod(self.size(one) for one in axes[axes.index(axis) + 1 :])

    def dp_rank(self, rank: int) -> int:
        """Which part of the data a rank sees."""
        return rank % self.stage_size // (self.cp * self.tp)

    def dp_cp_rank(self, rank: int) -> int:
        """Which part of the tokens a rank sees."""
        return rank % self.stage_size // self.tp

    def tokens_per_rank(self, tokens: int) -> int:
        """Tokens that a rank routes, at most, if its data-parallel rank has so many: context- and tensor-parallel ranks
        share them."""
        return -(-tokens // (self.cp * self.tp))

    def record(self) -> dict[str, int]:
        """As in run.json, with the names that the configuration and transformers use."""
        names = dict.fromkeys((*NON_EXPERT_AXES, *EXPERT_AXES))
        return {"world_size": self.world_size, **{f"{name}_size": self.size(name) for name in names}}

    def __str__(self) -> str:
        dense = f"fsdp {self.fsdp} x tp {self.tp}, experts ep {self.ep} x efsdp {self.efsdp}"
        more = "".join(f", {axis} {self.size(axis)}" for axis in ("cp", "etp", "pp") if self.size(axis) > 1)
        return f"{dense}, replicas {self.dp_replicate}{more}"


def chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """How many rows each rank has if they are sharded as DTensor does it: ceil(rows / ranks), and what is left."""
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))
