"""The degrees of parallelism of a run: over how many ranks each dimension of the work is divided.

    dense parameters    dp_replicate x fsdp x tp         = all ranks
    experts             dp_replicate x efsdp x ep        = all ranks

Made once, by `carpool.train.config.schema.ParallelismSection.resolve`. Whatever follows from the sizes (who sees
which data, how many tokens a rank has) is computed here and nowhere else.

    8 ranks, tp = 2, ep = 4    ->  fsdp = 4, efsdp = 2, and 4 data-parallel ranks: ranks 0 and 1 see the same tokens
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """All degrees, as numbers.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP).
        fsdp: ranks that shard the dense parameters of a copy and see distinct data.
        tp: tensor-parallel ranks.
        ep: ranks over which a layer's experts are spread.
    """

    dp_replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        assert (self.fsdp * self.tp) % self.ep == 0, f"{self} does not tile its ranks"

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.fsdp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks of one copy of the model that hold the same experts, sharded among themselves."""
        return self.fsdp * self.tp // self.ep

    @property
    def dp(self) -> int:
        """Ranks that see distinct data."""
        return self.dp_replicate * self.fsdp

    @property
    def dense_shards(self) -> int:
        """Ranks among which one copy of a dense parameter is divided."""
        return self.fsdp * self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks among which one copy of all experts is divided."""
        return self.ep * self.efsdp

    def dp_rank(self, rank: int) -> int:
        """Which part of the data a rank sees."""
        return rank // self.tp

    def tokens_per_rank(self, tokens: int) -> int:
        """Tokens that a rank routes, at most, if its data-parallel rank has so many: tensor-parallel ranks share."""
        return -(-tokens // self.tp)

    def record(self) -> dict[str, int]:
        """As in run.json, with the names that the configuration and transformers use."""
        sizes = {"dp_replicate": self.dp_replicate, "fsdp": self.fsdp, "tp": self.tp, "ep": self.ep}
        sizes["efsdp"] = self.efsdp
        return {"world_size": self.world_size, **{f"{name}_size": size for name, size in sizes.items()}}

    def __str__(self) -> str:
        return f"fsdp {self.fsdp} x tp {self.tp}, experts ep {self.ep} x efsdp {self.efsdp}, copies {self.dp_replicate}"
