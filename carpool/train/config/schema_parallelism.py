"""The section [parallelism]: how many ranks there are, and how they are divided."""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from carpool.parallel.degrees import NON_EXPERT_AXES, Degrees, chunks, data_speeds, shares
from carpool.parallel.world import find_world
from carpool.train.config.declarations import Excludes, Needs, Was
from carpool.train.config.schema_base import Numbers, Section

# All ranks are gone through one by one, in predictions too.
MAX_RANKS = 2**17


def _planned_or(key: str) -> Needs:
    """A planner may choose the size that the setting is about."""
    return Needs(f"{key} or parallelism.plan or memory.plan", key)


class ParallelismSection(Section):
    """How ranks are divided: pp_size x dp_replicate_size x fsdp_size x cp_size x tp_size = ranks; in each stage and
    copy, experts spread over ep_size x etp_size of them."""

    plan: Literal["auto"] | None = None
    """auto, in short parallelism=auto: the planner chooses those of these sizes, data_parallel, moe.transport and
    the division of a step into micro-batches that are not set: the fastest that is predicted to fit. It is shown,
    recorded in run.json and taken again on resume; after the first steps the run says what it measured beside it.
    none: the other keys say it."""
    num_ranks: int | None = Field(default=None, gt=0)
    """Processes to start on this machine; under torchrun or Slurm these decide. none: one per GPU, or 4 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. auto: cuda if there is a GPU, otherwise cpu."""
    fsdp_size: int | None = Field(default=None, gt=0)
    """Ranks that shard one replica of the parameters and each see other data. none: all ranks that the other sizes
    leave."""
    tp_size: Annotated[
        int,
        Excludes(
            "parallelism.ep_size=1 and parallelism.etp_size=1",
            "experts that are on every rank would be divided as non-expert layers are, which no transport knows",
            instead={"parallelism.ep_size": lambda settings: settings["parallelism.tp_size"]},
        ),
    ] = Field(default=1, gt=0)
    """Tensor-parallel ranks, which share the work on the same data. Only for models with a tensor-parallel plan in
    transformers."""
    sequence_parallel: Annotated[Literal["auto", "on", "off"], _planned_or("parallelism.tp_size")] = "auto"
    """With tp_size > 1: between two tensor-parallel blocks (norms, routers, MoE layers, the loss) a rank has its own
    tokens alone, and all-reduces become all-gathers and reduce-scatters. off: each rank has all tokens there. auto:
    on, if nothing speaks against it."""
    cp_size: int = Field(default=1, gt=0)
    """Context-parallel ranks, which share sequences: each has a part of every one. They shard non-expert parameters,
    too."""
    cp_attention: Annotated[
        Literal["auto", "ulysses", "ring"],
        _planned_or("parallelism.cp_size"),
        Excludes(
            "parallelism.cp_size and data.packing=examples",
            "ring attention has no masks, and packed examples need them",
            own="parallelism.cp_attention=ring",
            instead={"parallelism.cp_attention": "ulysses"},
        ),
    ] = "auto"
    """How context-parallel ranks compute attention. ulysses: each computes some of the heads, on whole sequences,
    with any mask. ring: keys and values of other ranks come by; causal attention only, and any number of heads.
    auto: ulysses, if cp_size divides the heads."""
    pp_size: int = Field(default=1, gt=0)
    """Pipeline stages: each has a part of the layers, on ranks of its own."""
    pp_schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        _planned_or("parallelism.pp_size"),
    ] = "1F1B"
    """In which order micro-batches (training.gradient_accumulation_steps) go through the stages. GPipe, 1F1B: each
    rank has one stage. Interleaved1F1B, InterleavedZeroBubble: two, one in each half of the model. ZBVZeroBubble,
    DualPipeV: two, as a V, so that the first rank has the embedding and the head."""
    dp_replicate_size: int = Field(default=1, gt=0)
    """Data-parallel replicas of the sharded model (HSDP). More than 1 keeps FSDP's all-gathers inside each replica,
    for example intra-node."""
    ep_size: int | None = Field(default=None, gt=0)
    """Ranks over which a layer's experts are spread. none: the largest number that divides both the ranks of a
    replica and the number of experts."""
    etp_size: int = Field(default=1, gt=0)
    """Expert-tensor-parallel ranks: each computes a part of the hidden dimension of the same experts, and a token is
    sent to all of them. ep_size * etp_size may be more than there are experts."""
    data_parallel: Annotated[
        Literal["auto", "fsdp", "zero1"],
        Was("parallelism.dense", {"replicate": "zero1"}),
        Excludes(
            "parallelism.tp_size",
            "whole non-expert parameters are on each rank, and tensor parallelism divides them",
            own="parallelism.data_parallel=zero1",
            instead={"parallelism.data_parallel": "fsdp"},
        ),
    ] = "auto"
    """How data-parallel ranks hold parameters, those of experts too where several hold the same ones (ep_size). fsdp:
    sharded, and gathered for each layer. zero1: whole on each rank, and only the optimizer's state is sharded;
    gradients are reduced while the backward computes, and parameters gathered once after each step. auto: zero1, if
    the memory of a rank holds it."""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """Consecutive ranks that share a node, for limits by node and for the placement of experts. Set it where the
    launcher does not tell, or to try on one machine what several would do. none: as the launcher says."""
    hardware: str | None = None
    """Rates of links and computation, for what is predicted (placement, memory policies): the name of a GPU (H100,
    H200, A100, B200, ...) or a file of `carpool doctor --measure`. none: by the device's name."""
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """What one GPU (or what a rank on CPUs has) costs in an hour, in any currency: a dry run and the first lines of a
    run then say what the run costs, beside how long it takes. none: no costs."""
    rank_speeds: Literal["measured"] | Numbers | None = None
    """Speeds of the ranks, one number for each, in any unit: a rank gets sequences of a micro-batch in proportion
    (training.per_device_train_batch_size is their mean), and experts that move are placed by the time that they take
    there. measured: products are timed on each rank when a run starts. none: all are equal."""
    timeout_seconds: int = Field(default=600, gt=0)
    """A collective that takes longer than this ends the run with an error."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ep_size is not None and self.ep_size > 1 and self.ep_size * self.etp_size % self.tp_size:
            raise ValueError(
                f"{self._experts} must be a multiple of parallelism.tp_size = {self.tp_size}, whose ranks divide their "
                "tokens among themselves"
            )
        if isinstance(self.rank_speeds, tuple) and not all(speed > 0 for speed in self.rank_speeds):
            raise ValueError(f"parallelism.rank_speeds = {list(self.rank_speeds)}: speeds are above 0")
        # Under torchrun or Slurm there are as many ranks as these started, whatever a file says of one machine.
        if self.asked_ranks is not None and find_world(os.environ) is None:
            self.check_ranks(self.asked_ranks)
        return self

    @property
    def asked_ranks(self) -> int | None:
        """The number of ranks that the sizes are of; None: any."""
        if self.num_ranks is not None or self.fsdp_size is None:
            return self.num_ranks
        return self.fsdp_size * math.prod(self._others.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks by axis, of those that are known before the number of ranks is."""
        sizes = {axis: getattr(self, f"{axis}_size") for axis in dict.fromkeys((*NON_EXPERT_AXES, "ep", "etp"))}
        return {axis: size for axis, size in sizes.items() if size is not None}

    @property
    def _others(self) -> dict[str, int]:
        """All sizes of non-expert parameters but FSDP's, by key; those of 1 are left out, but for the first two."""
        others = {"tp_size": self.tp_size, "dp_replicate_size": self.dp_replicate_size}
        return others | {key: getattr(self, key) for key in ("cp_size", "pp_size") if getattr(self, key) > 1}

    @property
    def _experts(self) -> str:
        etp = f" * etp_size = {self.ep_size or 1} * {self.etp_size}" if self.etp_size > 1 else ""
        return f"parallelism.ep_size{etp} = {(self.ep_size or 1) * self.etp_size}"

    def check_ranks(self, world_size: int) -> tuple[int, int]:
        """`(fsdp_size, ranks of one copy of a stage)` for that many ranks; ValueError if they cannot be divided as
        asked."""
        if world_size > MAX_RANKS:
            raise ValueError(
                f"{world_size:,} ranks are more than any machine has (at most {MAX_RANKS:,}): ask for fewer"
            )
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
        if isinstance(self.rank_speeds, tuple) and len(self.rank_speeds) != world_size:
            raise ValueError(
                f"parallelism.rank_speeds has {len(self.rank_speeds)} numbers, but there are {world_size} ranks: give "
                "one for each"
            )
        others = math.prod(self._others.values())
        keys, numbers = " * ".join(self._others), " * ".join(map(str, self._others.values()))
        if world_size % others:
            nearest = " ".join(f"parallelism.{key}={size}" for key, size in self._nearest(world_size).items())
            raise ValueError(
                f"{world_size} ranks cannot be divided by parallelism.{keys} = {numbers} = {others}. The nearest sizes "
                f"that divide them: {nearest}"
            )
        fsdp_size = world_size // others if self.fsdp_size is None else self.fsdp_size
        if fsdp_size * others != world_size:
            raise ValueError(
                f"parallelism.fsdp_size * {keys} = {fsdp_size} * {numbers} = {fsdp_size * others}, but there are "
                f"{world_size} ranks: leave fsdp_size out to have it derived, or change parallelism.num_ranks"
            )
        shared = {"fsdp_size": fsdp_size, **({"cp_size": self.cp_size} if self.cp_size > 1 else {})}
        shared["tp_size"] = self.tp_size
        copy = math.prod(shared.values())
        if copy % ((self.ep_size or 1) * self.etp_size):
            raise ValueError(
                f"{self._experts} must divide {' * '.join(shared)} = {' * '.join(map(str, shared.values()))} = {copy}; "
                f"these do: {', '.join(str(n) for n in range(1, copy + 1) if copy % n == 0)}"
            )
        return fsdp_size, copy

    def _nearest(self, world_size: int) -> dict[str, int]:
        """Sizes by key that divide the ranks, in place of those that do not: as few others as can be, then as near as
        can be, and with the experts' sizes if there are such."""
        asked, experts = self._others, (self.ep_size or 1) * self.etp_size
        ways = [[n for n in range(1, 2 * size) if world_size % n == 0] for size in asked.values()]
        found: list[tuple[int, ...]] = [way for way in product(*ways) if world_size % math.prod(way) == 0]

        def distance(way: tuple[int, ...]) -> tuple[bool, int, float]:
            pairs = list(zip(asked.values(), way, strict=True))
            sizes = dict(zip(asked, way, strict=True))
            copies = sizes["dp_replicate_size"] * sizes.get("pp_size", 1)
            fits = world_size // copies % experts == 0 and (experts == 1 or experts % sizes["tp_size"] == 0)
            return not fits, sum(a != b for a, b in pairs), sum(abs(math.log(a / b)) for a, b in pairs)

        best = min(found, key=distance)
        return {key: size for key, size in zip(asked, best, strict=True) if size != asked[key]}

    def resolve(self, world_size: int, num_experts: int) -> Degrees:
        """Every degree as a number, for that many ranks and experts.

        Worked example: 8 ranks, tp_size 2, 20 experts, the rest derived: fsdp_size 4; ep_size is the largest
        multiple of 2 that divides 8 and 20, so 4; two groups of 4 ranks (efsdp_size 2) hold the experts.

        An ep_size that is asked for need not divide the experts if it is all ranks of a copy, so that nothing of them
        is sharded once more, and each rank has one at least: 10 on 4 ranks are 3, 3, 3 and 1.

        Raises:
            ValueError: the ranks cannot be divided so, or ep_size does not divide the number of experts.
        """
        fsdp_size, copy = self.check_ranks(world_size)
        most = copy // self.etp_size
        fits = [n for n in range(1, most + 1) if most % n == 0 and num_experts % n == 0]
        uneven = self.etp_size == 1 and self.ep_size == most and min(chunks(num_experts, most)) > 0
        if self.ep_size is not None and self.ep_size not in fits and not uneven:
            raise ValueError(
                f"parallelism.ep_size = {self.ep_size} does not divide the model's {num_experts} experts; with "
                f"{copy} ranks per copy these do: {', '.join(map(str, fits))}"
            )
        ep_size = self.ep_size or max((n for n in fits if n * self.etp_size % self.tp_size == 0), default=1)
        return Degrees(
            dp_replicate=self.dp_replicate_size,
            fsdp=fsdp_size,
            tp=self.tp_size,
            ep=ep_size,
            cp=self.cp_size,
            pp=self.pp_size,
            etp=self.etp_size,
        )

    def batch_sizes(self, mean: int, degrees: Degrees, total: int | None = None) -> tuple[int, ...]:
        """Sequences in a micro-batch of each data-parallel rank, if they are `mean` on the mean, or `total` of all."""
        if isinstance(self.rank_speeds, tuple):
            return shares(total or mean * degrees.dp, data_speeds(self.rank_speeds, degrees))
        return (mean,) * degrees.dp if total is None else shares(total, (1.0,) * degrees.dp)
