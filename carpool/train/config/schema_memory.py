"""The section [memory]: which activations are saved for the backward, and where; where experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from carpool.train.config.declarations import Excludes, Needs, Was
from carpool.train.config.schema_base import Section, Size, size_of

if TYPE_CHECKING:
    from carpool.activations import ActivationPolicies

ITEMS = ("expert_inputs", "expert_activations", "layer_activations", "moe_outputs")
_SAVED = {"keep": "save"}
_EAGER = {"training.torch_compile": "auto"}
_TRAINED = "adapter.kind=none and training.freeze!=experts"


class MemorySection(Section):
    """Which activations are saved for the backward, and where experts are. Every policy gives the same bits."""

    plan: Literal["auto"] | None = None
    """auto, in short memory=auto: the planner chooses the activation settings of this section that are not set,
    training.optimizer_offload, and, where training.max_grad_norm = 0, training.optimizer_in_backward: the fastest
    that is predicted to fit into the device, or the budget. See parallelism.plan. none: the other keys say it."""
    budget: Annotated[
        Size | None, Excludes("parallelism.pp_size", "policies are chosen for one micro-batch at a time")
    ] = None
    """What a rank may use of its device, such as "70GiB". The activation settings that are not set are then chosen:
    those that fit and cost least time. Before the first step a run measures what each costs, on a few layers of its
    model. run.json records both, and a resumed run keeps them. none: what is not set is saved."""
    expert_inputs: Annotated[Literal["save", "resend", "offload"] | None, Was("memory.rows", _SAVED)] = None
    """The tokens that arrived at a rank's experts, for the backward. save: in the memory of the device. resend: they
    are dispatched a second time in the backward, which takes time on the links and a second buffer of nvlink.
    offload: they are copied to host memory, overlapped, and come back before their layer's backward."""
    expert_activations: Annotated[
        Literal["save", "recompute", "offload"] | None,
        Was("memory.hidden", _SAVED),
        Excludes(
            "moe.experts!=auto or grouped",
            "only grouped experts compute their activations again",
            own="memory.expert_activations=recompute",
        ),
    ] = None
    """The pre-activations of grouped experts, one for each choice of a token. recompute: the backward computes them
    again from the experts' inputs, one more grouped GEMM. save, offload: as for expert_inputs."""
    layer_activations: Annotated[Literal["save", "recompute", "offload"] | None, Was("memory.dense", _SAVED)] = None
    """What decoder layers save besides their MoE layers: attention, norms, residuals. recompute: activation
    checkpointing; each layer is computed again in the backward, but its tokens do not travel again. save, offload:
    as for expert_inputs."""
    moe_outputs: Annotated[
        Literal["save", "recompute"] | None,
        Was("memory.sums", _SAVED),
        Needs(
            "memory.layer_activations=recompute or none and memory.layer_activations=recompute or "
            "memory.budget or parallelism.plan or memory.plan",
            "layers that are computed again: memory.layer_activations=recompute",
        ),
        Excludes(
            "memory.expert_inputs=offload or memory.expert_activations=offload",
            "whole rides are repeated, and what is offloaded is what they saved until then",
            own="memory.moe_outputs=recompute",
        ),
    ] = None
    """With layer_activations = recompute: MoE outputs, and results of tensor-parallel communication. save: nothing
    is communicated twice. recompute: it is, and none of it is saved."""

    experts: Annotated[
        Literal["device", "host", "disk"],
        Excludes("parallelism.etp_size", "experts come from there one by one, and their slices are not stored so"),
        Excludes(
            "parallelism.pp_size",
            "experts outside of the device are updated in the backward of one micro-batch, and pipeline stages "
            "have several: in host memory they must be frozen (training.freeze=experts)",
            own="memory.experts and memory.experts=disk or training.freeze!=experts",
        ),
        Excludes(
            f"{_TRAINED} and training.optimizer_in_backward=false and parallelism.plan=none and memory.plan=none",
            "the gradients of experts that are trained would be on the device all together, unless "
            'training.optimizer_in_backward=true with training.max_grad_norm=0 or training.grad_clipping="delayed"',
        ),
        Excludes(
            f"memory.expert_device_memory and {_TRAINED}",
            "experts that are trained change in each step, and none can stay on the device",
            instead={"memory.expert_device_memory": None},
        ),
        Excludes("moe.schedule=two-batch", "two batches are at two layers at a time", instead={"moe.schedule": "none"}),
        Excludes("training.torch_compile=on", "compiled layers hold their parameters", instead=_EAGER),
        Excludes("placement.every", "experts that are loaded layer by layer cannot move between ranks"),
    ] = "device"
    """host: experts' parameters are in host memory, and come to the GPU layer by layer, ahead of use, in forward and
    backward. To train them takes training.optimizer_in_backward = true. disk: they come from disk in the same way;
    those that adapters leave frozen from the files of model.path, those that are trained from files in
    memory.disk_folder, to which they are written back."""
    expert_loading: Annotated[
        Literal["layers", "popular"], Needs("memory.experts", "experts that come: memory.experts=host or disk")
    ] = "layers"
    """With experts = host or disk. layers: all experts of a layer come ahead. popular: those come ahead that the
    last batches chose, the most popular first, and others when a router chooses them. What nobody chooses does not
    come; but experts that are trained come whole in the backward, for their update."""
    expert_device_memory: Annotated[
        Size | None,
        Was("memory.experts_memory"),
        Needs(
            "memory.experts and memory.expert_loading=popular",
            "experts that come if they are chosen: memory.experts=host or disk, and memory.expert_loading=popular",
        ),
    ] = None
    """With expert_loading = popular and adapters: of the device, such as "20GiB", what keeps the most popular
    experts."""
    expert_host_memory: Annotated[
        Size | None,
        Was("memory.experts_host_memory"),
        Needs("memory.experts=disk", "experts on disk: memory.experts=disk"),
    ] = None
    """With experts = disk: of host memory on each rank, what keeps experts: of those that are trained, as many
    layers as fit; of those that adapters leave frozen, the most popular ones (expert_loading)."""
    disk_folder: Annotated[
        str | None,
        Needs(
            "memory.experts=disk or training.optimizer_offload=disk or parallelism.plan or memory.plan",
            "memory.experts=disk or training.optimizer_offload=disk",
        ),
    ] = None
    """Where the files of training.optimizer_offload = disk and memory.experts = disk are made, on a fast disk of
    each machine. They have no names there, and are gone when the run ends. none: where training.output_dir is."""

    @property
    def policies(self) -> dict[str, str]:
        """Of each item of saved activations; what is none is saved."""
        return {item: getattr(self, item) or "save" for item in ITEMS}

    @property
    def budget_bytes(self) -> int | None:
        """None: there is no budget."""
        return None if self.budget is None else size_of(self.budget, "memory.budget")

    @property
    def activation_policies(self) -> ActivationPolicies:
        """What rides do."""
        from carpool.activations import ActivationPolicies

        return ActivationPolicies(self.expert_inputs or "save", self.expert_activations or "save")

    @property
    def experts_bytes(self) -> tuple[int, int]:
        """Of the device and of host memory, for experts that stay there."""
        device, host = self.expert_device_memory, self.expert_host_memory
        return (
            0 if device is None else size_of(device, "memory.expert_device_memory"),
            0 if host is None else size_of(host, "memory.expert_host_memory"),
        )
