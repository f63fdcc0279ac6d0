"""The section [parallelism]: how many ranks there are, and how they are divided."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from carpool.parallel.degrees import Degrees
from carpool.train.config.schema_base import Section


class ParallelismSection(Section):
    """How ranks are divided: dp_replicate_size x fsdp_size x tp_size = ranks; experts spread over ep_size of them."""

    num_ranks: int | None = Field(
        default=None,
        gt=0,
        description="Processes to start on this machine; under torchrun or Slurm these decide. none: one per GPU, "
        "or 4 on a CPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to train. auto: cuda if there is a GPU, otherwise cpu."
    )
    fsdp_size: int | None = Field(
        default=None,
        gt=0,
        description="Ranks that shard one copy of the parameters and each see other data. none: all ranks that "
        "the other sizes leave.",
    )
    tp_size: int = Field(
        default=1,
        gt=0,
        description="Tensor-parallel ranks, which share the work on the same data. Only for models with a "
        "tensor-parallel plan in transformers.",
    )
    dp_replicate_size: int = Field(
        default=1,
        gt=0,
        description="Copies of the sharded model (HSDP). More than 1 keeps FSDP's gathers inside each copy, for "
        "example inside a node.",
    )
    ep_size: int | None = Field(
        default=None,
        gt=0,
        description="Ranks over which a layer's experts are spread. none: the largest number that divides both "
        "the ranks of one copy and the number of experts.",
    )
    dense: Literal["auto", "fsdp", "replicate"] = Field(
        default="auto",
        description="How parameters that are not experts' lie on the ranks. fsdp: sharded, and gathered for each "
        "layer. replicate: whole on each rank, only the optimizer's state is sharded; gradients are reduced beside the "
        "backward, and parameters gathered once after each step. auto: replicate, if the memory of a rank holds it.",
    )
    ranks_per_node: int | None = Field(
        default=None,
        gt=0,
        description="Consecutive ranks that share a node, for limits by node and for the placement of experts. "
        "Set it where the launcher does not tell, or to try on one machine what several would do. "
        "none: as the launcher says.",
    )
    hardware: str | None = Field(
        default=None,
        description="Rates of links and computation, for what is predicted (placement, memory policies): the name of a "
        "GPU (H100, H200, A100, B200, ...) or a file of `carpool doctor --measure`. none: by the device's name.",
    )
    timeout_seconds: int = Field(
        default=600, gt=0, description="A collective that takes longer than this ends the run with an error."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ep_size is not None and self.ep_size > 1 and self.ep_size % self.tp_size:
            raise ValueError(
                f"parallelism.ep_size = {self.ep_size} must be a multiple of parallelism.tp_size = {self.tp_size}"
            )
        if self.dense == "replicate" and self.tp_size > 1:
            raise ValueError(
                "parallelism.dense = 'replicate' keeps dense parameters whole, and parallelism.tp_size = "
                f"{self.tp_size} divides them: use dense = 'fsdp' or tp_size = 1"
            )
        if self.num_ranks is not None:
            self.check_ranks(self.num_ranks)
        elif self.fsdp_size is not None:
            self.check_ranks(self.fsdp_size * self.tp_size * self.dp_replicate_size)
        return self

    def check_ranks(self, world_size: int) -> tuple[int, int]:
        """`(fsdp_size, ranks of one copy)` for that many ranks; ValueError if they cannot be divided as asked."""
        if self.ep_size is not None and self.ep_size > world_size:
            raise ValueError(
                f"parallelism.ep_size = {self.ep_size} is larger than the number of ranks, {world_size}: lower it, or "
                f"start at least {self.ep_size} ranks (parallelism.num_ranks)"
            )
        if self.ranks_per_node is not None and world_size % self.ranks_per_node:
            raise ValueError(
                f"parallelism.ranks_per_node = {self.ranks_per_node} does not divide the {world_size} ranks: change it "
                "or parallelism.num_ranks"
            )
        others = self.tp_size * self.dp_replicate_size
        if world_size % others:
            raise ValueError(
                f"{world_size} ranks cannot be divided by parallelism.tp_size * dp_replicate_size = "
                f"{self.tp_size} * {self.dp_replicate_size} = {others}"
            )
        fsdp_size = world_size // others if self.fsdp_size is None else self.fsdp_size
        if fsdp_size * others != world_size:
            raise ValueError(
                f"parallelism.fsdp_size * tp_size * dp_replicate_size = {fsdp_size} * {self.tp_size} * "
                f"{self.dp_replicate_size} = {fsdp_size * others}, but there are {world_size} ranks: leave fsdp_size "
                "out to have it derived, or change parallelism.num_ranks"
            )
        copy = fsdp_size * self.tp_size
        if self.ep_size is not None and copy % self.ep_size:
            raise ValueError(
                f"parallelism.ep_size = {self.ep_size} must divide fsdp_size * tp_size = {fsdp_size} * {self.tp_size} "
                f"= {copy}"
            )
        return fsdp_size, copy

    def resolve(self, world_size: int, num_experts: int) -> Degrees:
        """Every degree as a number, for that many ranks and experts.

        Worked example: 8 ranks, tp_size 2, 20 experts, the rest derived: fsdp_size 4; ep_size is the largest
        multiple of 2 that divides 8 and 20, so 4; two groups of 4 ranks (efsdp_size 2) hold the experts.

        Raises:
            ValueError: the ranks cannot be divided so, or ep_size does not divide the number of experts.
        """
        fsdp_size, copy = self.check_ranks(world_size)
        if self.ep_size is not None:
            if num_experts % self.ep_size:
                fits = [n for n in range(1, copy + 1) if copy % n == 0 and num_experts % n == 0]
                raise ValueError(
                    f"parallelism.ep_size = {self.ep_size} does not divide the model's {num_experts} experts; with "
                    f"{copy} ranks per copy these do: {', '.join(map(str, fits))}"
                )
            ep_size = self.ep_size
        else:
            fits = [n for n in range(self.tp_size, copy + 1, self.tp_size) if copy % n == 0 and num_experts % n == 0]
            ep_size = max(fits, default=1)
        return Degrees(self.dp_replicate_size, fsdp_size, self.tp_size, ep_size)
