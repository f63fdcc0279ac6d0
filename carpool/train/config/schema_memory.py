"""The section [memory]: what is kept for the backward, and where; where experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from carpool.planner.kept import POLICIES
from carpool.train.config.schema_base import Section
from carpool.train.config.sizes import size_of

if TYPE_CHECKING:
    from carpool.memory.policies import KeptPolicies


class MemorySection(Section):
    """What is kept for the backward, item by item, and where experts are. Every policy gives the same bits."""

    plan: Literal["auto"] | None = Field(
        default=None,
        description="auto, in short memory=auto: the planner chooses what is not said of rows, hidden, dense and "
        "sums, and of training.optimizer_state: the fastest that is predicted to fit into the device, or the budget. "
        "See parallelism.plan. none: the other keys say it.",
    )
    budget: str | None = Field(
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
    disk_folder: str | None = Field(
        default=None,
        description="Where the files of training.optimizer_state = disk and memory.experts = disk are made, on a fast "
        "disk of each machine. They have no names there, and are gone when the run ends. none: where "
        "training.output_dir is.",
    )

    @property
    def policies(self) -> dict[str, str]:
        """Of each item of `carpool.planner.kept`; what is none is kept."""
        return {item: getattr(self, item) or "keep" for item in POLICIES}

    @property
    def budget_bytes(self) -> int | None:
        """None: there is no budget."""
        return None if self.budget is None else size_of(self.budget)

    @property
    def kept(self) -> KeptPolicies:
        """What rides do."""
        from carpool.memory.policies import KeptPolicies

        return KeptPolicies(self.rows or "keep", self.hidden or "keep")

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.budget is not None:
            size_of(self.budget)
        if self.sums == "recompute":
            if self.dense != "recompute" and (self.dense is not None or self.budget is None):
                raise ValueError(
                    "memory.sums = 'recompute' is of layers that are computed again: set memory.dense=recompute, or "
                    "leave it out"
                )
            for item in ("rows", "hidden"):
                if getattr(self, item) == "offload":
                    raise ValueError(
                        f"memory.sums = 'recompute' repeats whole rides, and memory.{item} = 'offload' is about what "
                        "they keep until then: leave one of them out"
                    )
        return self
