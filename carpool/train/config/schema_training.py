"""The section [training]: optimizer, schedule, steps and the run's folder."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from carpool.optim import OPTIMIZERS, OptimizerBase, find_optimizer
from carpool.train.config.schema_base import (
    NONE_IS_A_WORD,
    Section,
    Texts,
    check_options,
    known_name,
    listed_options,
)


def _known_optimizer(name: str) -> str:
    """Names are the registry's, plug-ins' included."""
    return known_name("training.optimizer", name, ("auto", *OPTIMIZERS))


OptimizerName = Annotated[str, AfterValidator(_known_optimizer)]


class TrainingSection(Section):
    """Optimizer, schedule, steps and the run's folder; transformers' names."""

    output_dir: str = Field(
        default="runs/demo", min_length=1, description="Folder of this run: metrics, checkpoints, settings, report."
    )
    max_steps: int | None = Field(
        default=180,
        gt=0,
        description="Optimizer steps of the whole run, resumed parts included. Either this or num_train_epochs; the "
        "other is none.",
    )
    num_train_epochs: float | None = Field(
        default=None,
        gt=0,
        description="How often the whole run goes through data.train; 0.5: through half of it. The run records the "
        "steps that this takes as max_steps, rounded up.",
    )
    stop_at_step: int | None = Field(
        default=None,
        gt=0,
        description="End after this step, with a checkpoint; the learning rate still follows max_steps. For a "
        "part of a longer run. none: run to max_steps.",
    )
    per_device_train_batch_size: int = Field(
        default=12, gt=0, description="Sequences in one micro-batch of each data-parallel rank."
    )
    per_device_eval_batch_size: int | None = Field(
        default=None, gt=0, description="The same in evaluation. none: as many as in training."
    )
    gradient_accumulation_steps: int = Field(default=1, gt=0, description="Micro-batches in one optimizer step.")
    learning_rate: float = Field(default=5e-3, ge=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="How the learning rate falls from the end of warm-up to max_steps."
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate at max_steps, as a share of the peak."
    )
    warmup_steps: float = Field(
        default=0.2, ge=0, description="Steps of linear warm-up; below 1, a share of max_steps (as in transformers)."
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="AdamW's decoupled weight decay (not on norms and biases)."
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    optimizer: OptimizerName = Field(
        default="auto",
        description="one-pass: AdamW of carpool.optim, one kernel on GPUs, with float32 masters of bfloat16 "
        "parameters (16 more bits each). torch: torch.optim.AdamW, which updates bfloat16 parameters and moments in "
        "bfloat16 (lossy). auto: torch for parameters and moments in float32, and for float16; else one-pass.",
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of that optimizer alone, such as one of a plug-in (carpool/optim/base.py): "
        "training.optimizer_options.NAME=VALUE. Those of this package have none.",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="How AdamW's moments are kept: 8, 4 or 2 bytes a parameter. bfloat16 and int8 (blocks of 256) are "
        "lossy, and need the one-pass optimizer.",
    )
    optimizer_offload: Annotated[Literal["none", "host", "disk"], NONE_IS_A_WORD] = Field(
        default="none",
        description="host: moments, and the 16 bits that make a bfloat16 parameter a float32 master, are in host "
        "memory, and go through the GPU in each step; the results are the same bit by bit. disk: they are in files "
        "(memory.disk_folder), and are read and written in each step. Needs the one-pass optimizer.",
    )
    optimizer_in_backward: bool = Field(
        default=False,
        description="Each gradient is used for its update inside the backward, and freed. Needs the one-pass "
        "optimizer, one micro-batch in a step, and no clipping (training.max_grad_norm = 0) or "
        'training.grad_clipping = "delayed".',
    )
    grad_clipping: Literal["exact", "delayed"] = Field(
        default="exact",
        description="delayed: with training.optimizer_in_backward, gradients are clipped by the norm of the step "
        "before, which is lossy. exact: by the norm of the step itself.",
    )
    max_grad_norm: float = Field(
        default=1.0,
        ge=0,
        description="Gradients are clipped to this global norm over all ranks and experts. 0: no clipping.",
    )
    bf16: bool | None = Field(
        default=None,
        description="Compute in bfloat16 (parameters keep model.dtype). none: true on GPUs, false on CPUs.",
    )
    loss_chunk_size: int | None = Field(
        default=None,
        ge=0,
        description="Tokens whose logits are in memory at once when the loss is computed. none: as many as make 1 GiB "
        "of them in bfloat16. 0: all of a micro-batch, as the model itself makes them.",
    )
    freeze: Literal["non_expert", "experts"] | None = Field(
        default=None,
        description="non_expert: only experts and routers are trained, as for fine-tuning with moe.limit_ranks. "
        "experts: "
        "all but the experts is trained, which stages of a pipeline may then have in host memory (memory.experts). "
        "none: everything is.",
    )
    torch_compile: bool = Field(
        default=False,
        description="Compile each decoder layer with torch.compile. It takes about a minute at the start; then "
        "steps are shorter, most where the GPU waits for the host.",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Capture forward and backward as CUDA graphs, which the host launches at once; of a pipeline, "
        "those of each stage. auto: where that is possible; the run says why where it is not. on: an error where it is "
        "not.",
    )
    torch_compile_backend: str = Field(default="inductor", description="Backend of torch.compile.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the initial weights and of the order of the data."
    )
    check_memory: bool = Field(
        default=True,
        description="Refuse, before anything is loaded, a run that is predicted to need clearly more memory than a "
        "rank has. false: try it.",
    )
    full_determinism: bool = Field(
        default=False,
        description="Two runs on GPUs are bitwise equal, by PyTorch's deterministic algorithms; the backward of "
        "fused attention is then slower. Runs on CPUs are bitwise equal anyway.",
    )
    logging_steps: int = Field(default=1, gt=0, description="Steps between lines of metrics.")
    eval_steps: int | None = Field(
        default=90, gt=0, description="Steps between evaluations; there is one more at the end. none: only at the end."
    )
    eval_on_start: bool = Field(default=True, description="Evaluate before the first step too.")
    sample_prompt: str | None = Field(
        default="def ", description="At each evaluation the model continues this text. none: no sample."
    )
    sample_tokens: int = Field(default=32, gt=0, description="Length of that sample in tokens.")
    save_steps: int | None = Field(
        default=90, gt=0, description="Steps between checkpoints; there is one more at the end. none: only at the end."
    )
    save_total_limit: int | None = Field(
        default=2, gt=0, description="How many of the newest checkpoints are kept. none: all."
    )
    save_pretrained: bool = Field(
        default=True,
        description="At the end, also write the model as a plain transformers checkpoint, into the folder model "
        "of output_dir.",
    )
    resume_from_checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description='Go on from a checkpoint: "last" (the newest good one in output_dir), "auto" (that one, or the '
        "beginning where no checkpoint was saved yet: for jobs that a scheduler starts again) or a checkpoint's "
        "folder. none: start anew.",
    )
    report_to: Texts = Field(
        default=(),
        description="Where metrics go beside metrics.jsonl: tensorboard, wandb, or others that transformers "
        "knows; one or a list. none: nowhere else.",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="Peak FLOP/s of one device, from which MFU is computed. none: the datasheet's figure where "
        "this GPU is known.",
    )

    @property
    def steps(self) -> int:
        """`max_steps` of a run whose data have been read: a number of epochs is known as steps then."""
        assert self.max_steps is not None
        return self.max_steps

    def in_steps(self, steps_per_epoch: float) -> TrainingSection:
        """The same, with a number of steps in place of a number of epochs.

        Raises:
            ValueError: warm-up would take more steps than there are."""
        if self.num_train_epochs is None:
            return self
        steps = max(1, math.ceil(self.num_train_epochs * steps_per_epoch))
        return self.model_validate({**self.model_dump(), "max_steps": steps, "num_train_epochs": None})

    @property
    def eval_batch_size(self) -> int:
        """Sequences in one batch of each data-parallel rank in evaluation."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    def warmup(self) -> int:
        """Steps of warm-up: `warmup_steps` itself, or that share of `max_steps`, rounded up, if it is below 1."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return -int(-self.steps * self.warmup_steps // 1)

    def computes_in_bf16(self, cuda: bool) -> bool:
        """Whether a run computes in bfloat16, on GPUs (`cuda`) or on CPUs."""
        return cuda if self.bf16 is None else self.bf16

    def optimizer_class(self, dtype: str) -> type[OptimizerBase]:
        """What updates parameters of this dtype."""
        in_backward = self.optimizer_in_backward
        return find_optimizer(self.optimizer, dtype, self.optimizer_state_dtype, self.optimizer_offload, in_backward)

    def ablest_optimizer(self) -> type[OptimizerBase]:
        """What would update them with other settings of moments, state and gradients: "auto" leaves that open."""
        return find_optimizer(self.optimizer, in_backward=True)

    def _check_optimizer(self) -> None:
        """Raise ValueError for moments, state, gradients and options that the optimizer does not have."""

        def lacks(cls: type[OptimizerBase]) -> str | None:
            there: dict[str, tuple[Any, ...]] = {"optimizer_state_dtype": cls.moments, "optimizer_offload": cls.places}
            there["optimizer_in_backward"] = (False, True) if cls.in_backward else (False,)
            return next((name for name, values in there.items() if getattr(self, name) not in values), None)

        cls = self.ablest_optimizer()
        if (name := lacks(cls)) is not None:
            value = getattr(self, name)
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            able = " or ".join(other for other in OPTIMIZERS if lacks(OPTIMIZERS[other]) is None)
            raise ValueError(
                f"training.{name} = {shown} needs the {able} optimizer, but "
                f'training.optimizer = "{self.optimizer}"; leave one of them out'
            )
        if self.optimizer_options:
            has = f"optimizer {cls.name!r} has {listed_options(cls.options)}"
            check_options("training.optimizer_options", self.optimizer_options, has, cls.options)

    @model_validator(mode="before")
    @classmethod
    def _epochs_for_steps(cls, data: Any) -> Any:
        """Who says a number of epochs need not take back the default number of steps."""
        if isinstance(data, dict) and data.get("num_train_epochs") is not None and "max_steps" not in data:
            return {**data, "max_steps": None}
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            both = "both are given" if self.max_steps is not None else "neither is given"
            raise ValueError(
                f"training.max_steps and training.num_train_epochs each say how long the run is, but {both}: set one "
                "of them, such as training.num_train_epochs=2"
            )
        self._check_optimizer()
        if self.optimizer_in_backward and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "training.optimizer_in_backward = true uses each gradient for an update as soon as it is there, but "
                f"training.gradient_accumulation_steps = {self.gradient_accumulation_steps} adds gradients of several "
                "micro-batches before the update; set it to 1, with a larger training.per_device_train_batch_size, or "
                "keep gradients (training.optimizer_in_backward = false)"
            )
        if self.optimizer_in_backward and self.max_grad_norm and self.grad_clipping == "exact":
            raise ValueError(
                "training.optimizer_in_backward = true uses each gradient for an update as soon as it is there, but "
                "clipping "
                f"to training.max_grad_norm = {self.max_grad_norm:g} waits for the norm of all of them; set "
                'training.max_grad_norm=0 or training.grad_clipping="delayed", or keep gradients '
                "(training.optimizer_in_backward = false)"
            )
        if self.max_steps is not None and self.warmup() > self.max_steps:
            raise ValueError(
                f"training.warmup_steps = {self.warmup_steps:g} is more than training.max_steps = {self.max_steps}: "
                "warm-up would never end; lower the first or raise the second"
            )
        return self
