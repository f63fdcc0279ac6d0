"""The section [memory]: what is kept for the backward, and where; where experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from carpool.planner.candidate import POLICIES
from carpool.train.config.schema_base import Section
from carpool.train.config.sizes import Size, size_of

if TYPE_CHECKING:
    from carpool.activations import KeptPolicies


class MemorySection(Section):
    """What is kept for the backward, item by item, and where experts are. Every policy gives the same bits."""

    plan: Literal["auto"] | None = Field(
        default=None,
        description="auto, in short memory=auto: the planner chooses the activation settings of this section that are "
        "not set, training.optimizer_offload, and, where training.max_grad_norm = 0, training.optimizer_in_backward: "
        "the fastest that is predicted to fit into the device, or the budget. See parallelism.plan. none: the other "
        "keys say it.",
    )
    budget: Size | None = Field(
        default=None,
        description='What a rank may use of its device, such as "70GiB". The activation settings that are not set are '
        "then chosen: those that fit and cost least time. Before the first step a run measures what each costs, on a "
        "few layers of its model. run.json records both, and a resumed run keeps them. none: what is not set is saved.",
    )
    expert_inputs: Literal["save", "resend", "offload"] | None = Field(
        default=None,
        description="The tokens that arrived at a rank's experts, for the backward. save: in the memory of the device. "
        "resend: they are dispatched a second time in the backward, which takes time on the links and a second buffer "
        "of nvlink. offload: they are copied to host memory, overlapped, and come back before their layer's backward.",
    )
    expert_activations: Literal["save", "recompute", "offload"] | None = Field(
        default=None,
        description="The pre-activations of grouped experts, one for each choice of a token. recompute: the backward "
        "computes them again from the experts' inputs, one more grouped GEMM. save, offload: as for expert_inputs.",
    )
    layer_activations: Literal["save", "recompute", "offload"] | None = Field(
        default=None,
        description="What decoder layers save besides their MoE layers: attention, norms, residuals. recompute: "
        "activation checkpointing; each layer is computed again in the backward, but its tokens do not travel again. "
        "save, offload: as for expert_inputs.",
    )
    moe_outputs: Literal["save", "recompute"] | None = Field(
        default=None,
        description="With layer_activations = recompute: MoE outputs, and results of tensor-parallel communication. "
        "save: nothing is communicated twice. recompute: it is, and none of it is saved.",
    )

    experts: Literal["device", "host", "disk"] = Field(
        default="device",
        description="host: experts' parameters are in host memory, and come to the GPU layer by layer, ahead of use, "
        "in forward and backward. To train them takes training.optimizer_in_backward = true. disk: they come from disk "
        "in the same way; those that adapters leave frozen from the files of model.path, those that are trained from "
        "files in memory.disk_folder, to which they are written back.",
    )
    expert_loading: Literal["layers", "popular"] = Field(
        default="layers",
        description="With experts = host or disk. layers: all experts of a layer come ahead. popular: those come ahead "
        "that the last batches chose, the most popular first, and others when a router chooses them. What nobody "
        "chooses does not come; but experts that are trained come whole in the backward, for their update.",
    )
    cpu_expert_tokens: int | Literal["auto"] = Field(
        default=0,
        description="With experts = host and expert_loading = popular: an expert with at most so many tokens stays in "
        "host memory, and the CPU computes it, with the same bits each time, and those of the device to rounding. "
        "auto: as many as it takes less time for than loading; measured before the first step, and recorded.",
    )
    expert_device_memory: Size | None = Field(
        default=None,
        description='With expert_loading = popular and adapters: of the device, such as "20GiB", what keeps the most '
        "popular experts.",
    )
    expert_host_memory: Size | None = Field(
        default=None,
        description="With experts = disk: of host memory on each rank, what keeps experts: of those that are trained, "
        "as many layers as fit; of those that adapters leave frozen, the most popular ones (expert_loading).",
    )
    disk_folder: str | None = Field(
        default=None,
        description="Where the files of training.optimizer_offload = disk and memory.experts = disk are made, on a "
        "fast disk of each machine. They have no names there, and are gone when the run ends. none: where "
        "training.output_dir is.",
    )

    @property
    def policies(self) -> dict[str, str]:
        """Of each item of `carpool.planner.step.peak`; what is none is kept."""
        return {item: getattr(self, item) or "save" for item in POLICIES}

    @property
    def budget_bytes(self) -> int | None:
        """None: there is no budget."""
        return None if self.budget is None else size_of(self.budget)

    @property
    def kept(self) -> KeptPolicies:
        """What rides do."""
        from carpool.activations import KeptPolicies

        return KeptPolicies(self.expert_inputs or "save", self.expert_activations or "save")

    @property
    def experts_bytes(self) -> tuple[int, int]:
        """Of the device and of host memory, for experts that stay there."""
        device, host = self.expert_device_memory, self.expert_host_memory
        return (
            0 if device is None else size_of(device, "memory.expert_device_memory"),
            0 if host is None else size_of(host, "memory.expert_host_memory"),
        )

    @model_validator(mode="after")
    def _experts_come(self) -> Self:
        if self.cpu_expert_tokens != "auto" and self.cpu_expert_tokens < 0:
            raise ValueError(
                f"memory.cpu_expert_tokens = {self.cpu_expert_tokens}: expected 0 (the CPU computes none), or more"
            )
        _ = self.experts_bytes
        return self

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.budget is not None:
            size_of(self.budget)
        if self.moe_outputs == "recompute":
            for item in ("expert_inputs", "expert_activations"):
                if getattr(self, item) == "offload":
                    raise ValueError(
                        f"memory.moe_outputs = 'recompute' repeats whole rides, and memory.{item} = 'offload' is about "
                        "what they keep until then: leave one of them out"
                    )
        return self
