"""The section [memory]: what is kept for the backward, and where; where experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from carpool.planner.configuration.candidate import POLICIES
from carpool.train.config.schema_base import Section
from carpool.train.config.sizes import Size, size_of

if TYPE_CHECKING:
    from carpool.activations import KeptPolicies


class MemorySection(Section):
    """What is kept for the backward, item by item, and where experts are. Every policy gives the same bits."""

    plan: Literal["auto"] | None = Field(
        default=None,
        description="auto, in short memory=auto: the planner chooses what is not said of rows, hidden, dense and "
        "sums, of training.optimizer_state, and, where training.max_grad_norm = 0, of training.gradients: the fastest "
        "that is predicted to fit into the device, or the budget. "
        "See parallelism.plan. none: the other keys say it.",
    )
    budget: Size | None = Field(
        default=None,
        description='What a rank may use of its device, such as "70GiB". The policies that are none are then chosen: '
        "those that fit and cost least time: before the first step a run measures what each costs, on a few layers of "
        "its model. run.json records both, and a resumed run keeps them. none: what is none is kept.",
    )
    rows: Literal["keep", "resend", "offload"] | None = Field(
        default=None,
        description="The rows that arrived at a rank's experts. keep: in the memory of the device. resend: they travel "
        "a second time in the backward, which takes time on the links and a second buffer of nvlink. offload: they are "
        "copied to host memory beside the computation, and come back ahead of their layer's backward.",
    )
    hidden: Literal["keep", "recompute", "offload"] | None = Field(
        default=None,
        description="The pre-activations of grouped experts, one for each choice of a token. recompute: the backward "
        "computes them again from the rows, one more matrix product. keep, offload: as for rows.",
    )
    dense: Literal["keep", "recompute", "offload"] | None = Field(
        default=None,
        description="What decoder layers keep besides their rides: attention, norms, residuals. recompute: each layer "
        "is computed again in the backward, but for its ride (gradient checkpointing). keep, offload: as for rows.",
    )
    sums: Literal["keep", "recompute"] | None = Field(
        default=None,
        description="With dense = recompute, what rides return, and what tensor-parallel ranks send each other. keep: "
        "nothing travels a second time. recompute: it does, with its layer, and nothing of it is kept until then.",
    )

    experts: Literal["device", "host", "disk"] = Field(
        default="device",
        description="host: experts' parameters are in host memory, and come to the GPU layer by layer, ahead of use, "
        'in forward and backward. To train them takes training.gradients = "consumed". disk: they come from disk in '
        "the same way; those that adapters leave frozen from the files of model.path, those that are trained from "
        "files in memory.disk_folder, to which they are written back.",
    )
    expert_loading: Literal["layers", "popular"] = Field(
        default="layers",
        description="With experts = host or disk. layers: all experts of a layer come ahead. popular: those come ahead "
        "that the last batches chose, the most popular first, and others when a router chooses them. What nobody "
        "chooses does not come; but experts that are trained come whole in the backward, for their update.",
    )
    few_tokens: int | Literal["auto"] = Field(
        default=0,
        description="With experts = host and expert_loading = popular: an expert with at most so many tokens stays in "
        "host memory, and the CPU computes it, with the same bits each time, and those of the device to rounding. "
        "auto: as many as it takes less time for than loading; measured before the first step, and recorded.",
    )
    experts_memory: Size | None = Field(
        default=None,
        description='With expert_loading = popular and adapters: of the device, such as "20GiB", what keeps the most '
        "popular experts.",
    )
    experts_host_memory: Size | None = Field(
        default=None,
        description="With experts = disk: of host memory on each rank, what keeps experts: of those that are trained, "
        "as many layers as fit; of those that adapters leave frozen, the most popular ones (expert_loading).",
    )
    disk_folder: str | None = Field(
        default=None,
        description="Where the files of training.optimizer_state = disk and memory.experts = disk are made, on a fast "
        "disk of each machine. They have no names there, and are gone when the run ends. none: where "
        "training.output_dir is.",
    )

    @property
    def policies(self) -> dict[str, str]:
        """Of each item of `carpool.planner.memory.kept`; what is none is kept."""
        return {item: getattr(self, item) or "keep" for item in POLICIES}

    @property
    def budget_bytes(self) -> int | None:
        """None: there is no budget."""
        return None if self.budget is None else size_of(self.budget)

    @property
    def kept(self) -> KeptPolicies:
        """What rides do."""
        from carpool.activations import KeptPolicies

        return KeptPolicies(self.rows or "keep", self.hidden or "keep")

    @property
    def experts_bytes(self) -> tuple[int, int]:
        """Of the device and of host memory, for experts that stay there."""
        device, host = self.experts_memory, self.experts_host_memory
        return (
            0 if device is None else size_of(device, "memory.experts_memory"),
            0 if host is None else size_of(host, "memory.experts_host_memory"),
        )

    @model_validator(mode="after")
    def _experts_come(self) -> Self:
        if self.few_tokens != "auto" and self.few_tokens < 0:
            raise ValueError(f"memory.few_tokens = {self.few_tokens}: expected 0 (the CPU computes none), or more")
        _ = self.experts_bytes
        return self

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.budget is not None:
            size_of(self.budget)
        if self.sums == "recompute":
            for item in ("rows", "hidden"):
                if getattr(self, item) == "offload":
                    raise ValueError(
                        f"memory.sums = 'recompute' repeats whole rides, and memory.{item} = 'offload' is about what "
                        "they keep until then: leave one of them out"
                    )
        return self
