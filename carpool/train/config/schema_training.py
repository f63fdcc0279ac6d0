"""The section [training]: optimizer, schedule, steps and the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from carpool.optim import OPTIMIZERS, OptimizerBase, find_optimizer
from carpool.optim.base import AVERAGE_BYTES
from carpool.train.config.declarations import Demo, Excludes, Needs, Settings, Was
from carpool.train.config.schema_base import (
    NONE_IS_A_WORD,
    NONE_IS_NO,
    SWITCH,
    Section,
    Texts,
    check_options,
    listed_options,
    registered,
)
from carpool.train.config.schema_data import EVALUATES

# Models are compared by losses on the way.
_COMPARES = Needs(
    f"{EVALUATES.when} and training.eval_strategy!=no and training.eval_strategy=epoch or training.eval_steps!=none",
    f"{EVALUATES.says}, and evaluations before the end: training.eval_steps, or training.eval_strategy=epoch",
)


def _within(settings: Settings) -> bool:
    """Whether a run gets to the step at which it is to stop."""
    stop, steps = settings["training.stop_at_step"], settings["training.max_steps"]
    return steps is None or stop is None or stop <= steps


def _whole_uploads(value: Any) -> Any:
    """Refuses the other strategies of Transformers."""
    if value in ("every_save", "all_checkpoints"):
        raise ValueError(
            f'training.hub_strategy = "{value}": checkpoints hold shards and the optimizer\'s state, and no model for '
            "Transformers, which is written at the end: set end, or checkpoint, which uploads the newest one, too"
        )
    return value


class TrainingSection(Section):
    """Optimizer, schedule, steps and the run's folder; transformers' names."""

    output_dir: Annotated[str, Demo()] = Field(default="runs/demo", min_length=1)
    """Folder of this run: metrics, checkpoints, settings, report."""
    max_steps: Annotated[int | None, Demo()] = Field(default=180, gt=0)
    """Optimizer steps of the whole run, resumed parts included. Either this or num_train_epochs; the other is none."""
    num_train_epochs: float | None = Field(default=None, gt=0)
    """How often the whole run goes through data.train; 0.5: through half of it. The run records the steps that this
    takes as max_steps, rounded up."""
    stop_at_step: Annotated[int | None, Needs(_within, "a training.max_steps of as many steps at least")] = Field(
        default=None, gt=0
    )
    """End after this step, with a checkpoint; the learning rate still follows max_steps. For a part of a longer run.
    none: run to max_steps."""
    per_device_train_batch_size: Annotated[int, Demo()] = Field(default=12, gt=0)
    """Sequences in one micro-batch of each data-parallel rank."""
    per_device_eval_batch_size: Annotated[int | None, Demo(), EVALUATES] = Field(default=None, gt=0)
    """The same in evaluation. none: as many as in training."""
    micro_batch_sequences: Annotated[
        int | None,
        Excludes("parallelism.plan", "a plan divides steps equally"),
        Excludes("memory.plan", "a plan divides steps equally"),
    ] = Field(default=None, gt=0)
    """Sequences in one micro-batch of all data-parallel ranks together, which have unequal shares where their number
    does not divide it. Elastic groups set it. none: per_device_train_batch_size on each."""
    gradient_accumulation_steps: Annotated[int, Demo(4)] = Field(default=1, gt=0)
    """Micro-batches in one optimizer step."""
    learning_rate: Annotated[float, Demo()] = Field(default=5e-3, ge=0)
    """Peak learning rate."""
    learning_rates: dict[str, float] = Field(default_factory=dict)
    """Other peaks by patterns of parameters' names, in which * stands for any part: {"*.experts.*" = 1e-4}. The first
    that fits counts. All follow the same schedule."""
    loraplus_lr_ratio: Annotated[float | None, Needs("adapter.kind", "an adapter: adapter.kind=lora")] = Field(
        default=None, gt=0
    )
    """LoRA+ (arXiv 2402.12354): the learning rate of an adapter's lora_B by that of lora_A; the paper takes 16."""
    lr_scheduler_type: Annotated[
        str, Demo("cosine"), registered("training.lr_scheduler_type", "carpool.train.lr_schedules.LR_SCHEDULES")
    ] = "cosine"
    """How the learning rate goes on after warm-up: cosine, linear, polynomial or cosine_with_restarts, which fall until
    max_steps; inverse_sqrt; constant; or warmup_stable_decay (WSD), which is constant and falls at the end."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of that schedule. Of warmup_stable_decay: num_decay_steps (0.2; below 1, a share of max_steps) and
    decay_type = cosine, linear or 1-sqrt. Of polynomial: power (1). Of inverse_sqrt: timescale, in steps (as warm-up).
    Of cosine_with_restarts: num_cycles (1)."""
    decay_from: Annotated[
        int | None,
        Needs(
            "training.lr_scheduler_type=constant or constant_with_warmup or warmup_stable_decay",
            "training.lr_scheduler_type=warmup_stable_decay or constant",
        ),
    ] = Field(default=None, ge=0)
    """The learning rate falls after this step, to its minimum at max_steps: ends a run that has been stable so far,
    with training.resume_from_checkpoint. none: as lr_scheduler_type says."""
    min_lr_ratio: Annotated[
        float,
        Demo(0.1),
        Needs(
            "training.lr_scheduler_type!=constant or constant_with_warmup or training.decay_from",
            "training.lr_scheduler_type other than constant",
        ),
    ] = Field(default=0.1, ge=0, le=1)
    """The lowest learning rate, which most schedules have at max_steps, as a share of the peak."""
    warmup_steps: Annotated[float, Demo(0.03)] = Field(default=0.2, ge=0)
    """Steps of linear warm-up; below 1, a share of max_steps (as in transformers)."""
    weight_decay: Annotated[float, Demo(0.0)] = Field(default=0.1, ge=0)
    """Decoupled weight decay of AdamW and Muon (not on norms and biases)."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    adam_beta2: Annotated[float, Demo(0.999)] = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    optimizer: Annotated[str, registered("training.optimizer", "carpool.optim.OPTIMIZERS", "auto")] = "auto"
    """one-pass: AdamW of carpool.optim, one kernel on GPUs, with float32 masters of bfloat16 parameters (16 more
    bits each). torch: torch.optim.AdamW, which updates bfloat16 parameters and moments in bfloat16 (lossy). muon: Muon
    for the matrices of layers, each expert's by itself, with updates as large as AdamW's, and one-pass for embeddings,
    output layer, routers, norms and biases. auto: torch for parameters and moments in float32, and for float16; else
    one-pass."""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that optimizer alone, such as one of a plug-in (carpool/optim/base.py):
    training.optimizer_options.NAME=VALUE. Of this package muon has some: momentum (0.95), nesterov (true), ns_steps (5,
    of Newton–Schulz), ns_dtype ("bfloat16", or "float32")."""
    optimizer_state_dtype: Annotated[
        Literal["float32", "bfloat16", "int8"],
        Was("training.optimizer_moments"),
        Excludes(
            "parallelism.etp_size",
            "blocks of int8 moments are not those of whole experts, which checkpoints have",
            own="training.optimizer_state_dtype=int8",
            instead={"training.optimizer_state_dtype": "bfloat16"},
        ),
    ] = "float32"
    """In which AdamW's moments are stored: 8, 4 or 2 bytes a parameter; Muon's momentum in half of that. bfloat16 and
    int8 (blocks of 256) are lossy, and need the one-pass optimizer; muon has bfloat16."""
    optimizer_offload: Annotated[
        Annotated[Literal["none", "host", "disk"], NONE_IS_A_WORD],
        Was("training.optimizer_state", {"device": "none"}),
        Excludes(
            "parallelism.etp_size",
            "the optimizer's state in checkpoints has whole experts, and would travel between GPUs",
        ),
        Excludes("parallelism.pp_size", "state outside of the device is not known by stages"),
        Excludes(
            "placement.every",
            "the optimizer's state stays where it is, and placement.every moves experts with theirs between GPUs",
        ),
    ] = "none"
    """host: moments, and the 16 bits that make a bfloat16 parameter a float32 master, are in host memory, and go
    through the GPU in each step; the results are the same bit by bit. disk: they are in files (memory.disk_folder),
    and are read and written in each step. Needs the one-pass optimizer."""
    optimizer_in_backward: Annotated[
        bool,
        Was("training.gradients", {"kept": False, "consumed": True}),
        Excludes("parallelism.pp_size", "gradients of several micro-batches are added, and one backward consumes them"),
        Excludes(
            "training.gradient_accumulation_steps>1",
            "each gradient is used for an update as soon as it is there, before those of other micro-batches; a larger "
            "training.per_device_train_batch_size takes as many sequences in one",
        ),
        Excludes(
            "training.max_grad_norm>0 and training.grad_clipping=exact",
            "each gradient is used for an update as soon as it is there, and clipping waits for the norm of all of "
            "them, unless training.grad_clipping = delayed; or do not clip (training.max_grad_norm = 0)",
        ),
    ] = False
    """Each gradient is used for its update inside the backward, and freed. Needs the one-pass optimizer, one
    micro-batch in a step, and no clipping (training.max_grad_norm = 0) or training.grad_clipping = "delayed"."""
    ema_decay: Annotated[
        float | None,
        Excludes(
            "training.optimizer_offload!=none",
            "averages are on the device, and of float32 masters, whose low bits would have to come there in each step",
        ),
        Excludes(
            "memory.experts=host or disk and adapter.kind=none and training.freeze!=experts",
            "experts that are trained in host memory would be read there once more in each step",
        ),
    ] = Field(default=None, gt=0, lt=1)
    """Average the trained weights exponentially (EMA) with this decay, such as 0.999; early steps have a lower one,
    (1 + step) / (10 + step). Evaluations, samples, the best model, adapters and exports are then of the averaged
    weights, which take 4 more bytes of each trained parameter. none: no average."""
    grad_clipping: Annotated[
        Literal["exact", "delayed"],
        Was("training.clip_by", {"norm": "exact", "previous": "delayed"}),
        Needs(
            "training.optimizer_in_backward and training.max_grad_norm>0",
            "training.optimizer_in_backward=true, whose norm is not known when they are used, "
            "and a training.max_grad_norm",
        ),
    ] = "exact"
    """delayed: with training.optimizer_in_backward, gradients are clipped by the norm of the step before, which is
    lossy. exact: by the norm of the step itself."""
    max_grad_norm: Annotated[float, Demo(1.0)] = Field(default=1.0, ge=0)
    """Gradients are clipped to this global norm over all ranks and experts. 0: no clipping."""
    bf16: bool | None = None
    """Compute in bfloat16 (parameters keep model.dtype). none: true on GPUs, false on CPUs."""
    loss_chunk_size: Annotated[int | None, Was("training.loss_chunk")] = Field(default=None, ge=0)
    """Tokens whose logits are in memory at once when the loss is computed. none: as many as make 1 GiB of them in
    bfloat16. 0: all of a micro-batch, as the model itself makes them."""
    freeze: Annotated[Literal["non_expert", "experts"] | None, Was("training.freeze", {"dense": "non_expert"})] = None
    """non_expert: only experts and routers are trained, as for fine-tuning with moe.limit_ranks. experts: all but
    the experts is trained, which pipeline stages may then have in host memory (memory.experts). none: everything is."""
    torch_compile: Annotated[Literal["auto", "on", "off"], SWITCH] = "auto"
    """Compile each decoder layer with torch.compile; true is on, false is off. auto: on a GPU, where layers can be
    compiled and the run saves more time by it than compilation takes, which the planner's model of a step says
    (carpool/train/plan/compile_and_capture.py). The run says what it decided, and why."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Capture forward and backward as CUDA graphs, which the host launches at once; of a pipeline, those of each
    stage. auto: where that is possible; the run says why where it is not. on: an error where it is not."""
    torch_compile_backend: Annotated[str, Needs("training.torch_compile!=off", "training.torch_compile=on or auto")] = (
        "inductor"
    )
    """Backend of torch.compile."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data."""
    check_memory: bool = True
    """Refuse, before anything is loaded, a run that is predicted to need clearly more memory than a rank has. false:
    try it."""
    full_determinism: bool = False
    """Two runs on GPUs are bitwise equal, by PyTorch's deterministic algorithms; the backward of fused attention is
    then slower. Runs on CPUs are bitwise equal anyway."""
    logging_steps: int = Field(default=1, gt=0)
    """Steps between lines of metrics."""
    eval_steps: Annotated[
        int | None,
        Demo(100),
        Needs(
            "data.eval or data.eval_fraction>0 or training.sample_prompt!=none",
            "held-out data (data.eval, data.eval_fraction) or training.sample_prompt",
        ),
    ] = Field(default=90, gt=0)
    """Steps between evaluations; there is one more at the end. none: only at the end."""
    eval_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NONE_IS_NO,
        Excludes("data.streaming", "a stream has no epochs", own="training.eval_strategy=epoch"),
    ] = "steps"
    """When to evaluate. steps: every eval_steps; epoch: after each epoch; no: only at the end."""
    eval_on_start: bool = True
    """Evaluate before the first step too."""
    sample_prompt: Annotated[
        str | None, Demo(None), Needs("parallelism.pp_size=1", "parallelism.pp_size=1 (stages write no samples)")
    ] = "def "
    """At each evaluation the model continues this text. none: no sample."""
    sample_tokens: Annotated[int, Needs("training.sample_prompt!=none", "training.sample_prompt")] = Field(
        default=32, gt=0
    )
    """Length of that sample in tokens."""
    save_steps: Annotated[int | None, Demo(200)] = Field(default=90, gt=0)
    """Steps between checkpoints; there is one more at the end. none: only at the end."""
    save_strategy: Annotated[
        Literal["no", "steps", "epoch"],
        NONE_IS_NO,
        Excludes("data.streaming", "a stream has no epochs", own="training.save_strategy=epoch"),
    ] = "steps"
    """When to write a checkpoint. steps: every save_steps; epoch: after each epoch; no: only at the end."""
    async_save: Annotated[Literal["auto", "on", "off"], SWITCH] = "auto"
    """Checkpoints on the way are copied to host memory beside the next step and written by another process while
    training goes on; the next one waits for that. Each rank keeps host memory for its part; where there is none, and
    for the last checkpoint, training waits as with off. auto: on GPUs, unless experts or the optimizer's state are on
    disk."""
    save_total_limit: int | None = Field(default=2, gt=0)
    """How many of the newest checkpoints are kept; with load_best_model_at_end the best one is among them, or beside a
    single one. none: all."""
    load_best_model_at_end: Annotated[bool, _COMPARES] = False
    """Write a checkpoint whenever the held-out loss is the lowest so far (the best model), keep it, and end with it:
    the model and the adapter that the run writes are those of that step."""
    metric_for_best_model: Annotated[
        str | None,
        Needs(
            "training.load_best_model_at_end or training.early_stopping_patience",
            "training.load_best_model_at_end or training.early_stopping_patience",
        ),
    ] = None
    """The held-out set whose loss says which model is best, by its name. none: the mean over the tokens of all sets."""
    early_stopping_patience: Annotated[int | None, _COMPARES] = Field(default=None, gt=0)
    """Early stopping: end the run after so many evaluations without a lower held-out loss. none: no."""
    early_stopping_threshold: Annotated[float, Needs("training.early_stopping_patience")] = Field(default=0.0, ge=0)
    """How much lower a loss must be to count for early_stopping_patience."""
    max_rollbacks: Annotated[int, Excludes("placement.every", "experts stay where they have moved")] = Field(
        default=0, ge=0
    )
    """Where the loss or its gradient is no number, or the loss jumps (spike_factor), go back to the newest checkpoint,
    leave out the batches since, and go on; at most so often until the next checkpoint. 0: end the run."""
    spike_factor: float | None = Field(default=None, gt=1)
    """A loss of more than so many times the median of the last 32 steps is a spike. none: no loss is."""
    straggler_steps: int | None = Field(default=20, gt=0)
    """Name a rank that works clearly longer than the others over so many steps. none: name none."""
    save_pretrained: bool = True
    """At the end, also write the model as a plain transformers checkpoint, into the folder model of output_dir."""
    push_to_hub: Annotated[
        bool, Needs("training.save_pretrained=true or adapter.kind!=none", "training.save_pretrained=true")
    ] = False
    """Upload what the run has trained to the Hugging Face Hub at its end, with a model card: the model that
    save_pretrained writes, or the adapter. The token is that of HF_TOKEN or of `hf auth login`; whether it may write is
    checked before training."""
    hub_model_id: Annotated[str | None, Needs("training.push_to_hub")] = Field(default=None, min_length=1)
    """The repository: OWNER/NAME, or a name below the token's user. It is made, unless it is there. none: the name of
    output_dir."""
    hub_private_repo: Annotated[bool | None, Needs("training.push_to_hub")] = None
    """Whether a repository that is made is private. none: as the Hub has it for its owner (public for users)."""
    hub_strategy: Annotated[
        Literal["end", "checkpoint"], Needs("training.push_to_hub"), BeforeValidator(_whole_uploads)
    ] = "end"
    """checkpoint: besides, upload the newest checkpoint as the folder last-checkpoint, beside training; one that is
    saved while another is on its way is left out. end: only what was trained."""
    resume_from_checkpoint: str | None = Field(default=None, min_length=1)
    """Go on from a checkpoint: "last" (the newest good one in output_dir), "auto" (that one, or the beginning where
    no checkpoint was saved yet: for jobs that a scheduler starts again) or a checkpoint's folder. none: start anew."""
    report_to: Texts = ()
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, or others that transformers knows; one or a list.
    none: nowhere else."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Peak FLOP/s of one device, from which MFU is computed. none: the datasheet's figure where this GPU is known."""

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.output_dir)

    @property
    def rank_sequences(self) -> int:
        """Sequences of a data-parallel rank in one step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def compiled(self) -> bool:
        """Whether decoder layers are compiled, once that is decided."""
        return self.torch_compile == "on"

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
        # Seven epochs of 29/7 steps each are 29.000...04 in floating point.
        steps = max(1, math.ceil(self.num_train_epochs * steps_per_epoch - 1e-9))
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

    def saves_async(self, cuda: bool, experts: str) -> bool:
        """Whether checkpoints on the way are written beside training, on GPUs (`cuda`) or on CPUs. `experts`: where
        they are (memory.experts)."""
        on_disk = "disk" in (self.optimizer_offload, experts)
        return self.async_save == "on" or (self.async_save == "auto" and cuda and not on_disk)

    def optimizer_class(self, dtype: str) -> type[OptimizerBase]:
        """What updates parameters of this dtype."""
        in_backward = self.optimizer_in_backward
        return find_optimizer(self.optimizer, dtype, self.optimizer_state_dtype, self.optimizer_offload, in_backward)

    @property
    def lr_ratios(self) -> dict[str, float]:
        """Learning rates by patterns of parameters' names, as shares of `learning_rate`; the first that fits counts."""
        ratios = {
            name: rate / self.learning_rate if self.learning_rate else 1.0 for name, rate in self.learning_rates.items()
        }
        return ratios | ({"*.lora_B.*": self.loraplus_lr_ratio} if self.loraplus_lr_ratio is not None else {})

    def state_bytes(self, dtype: str, matrix: bool = False) -> Mapping[str, float]:
        """What the optimizer (`carpool.optim.base`) and the average keep of each element of a parameter of this dtype.

        Args:
            matrix: of a matrix of a layer."""
        cls = self.optimizer_class(dtype)
        found = (cls.matrix_state_bytes if matrix else cls.state_bytes)(dtype, self.optimizer_state_dtype)
        return found if self.ema_decay is None else {**found, "average": AVERAGE_BYTES}

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
                + (f" ({why})" if (why := cls.refusals.get(f"training.{name}")) else "")
            )
        if self.optimizer_options:
            has = f"optimizer {cls.name!r} has {listed_options(cls.options)}"
            check_options("training.optimizer_options", self.optimizer_options, has, cls.options)
            cls.check_options(self.optimizer_options)

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
        if self.max_steps is not None and self.warmup() > self.max_steps:
            raise ValueError(
                f"training.warmup_steps = {self.warmup_steps:g} is more than training.max_steps = {self.max_steps}: "
                "warm-up would never end; lower the first or raise the second"
            )
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        """Raise ValueError for options that the schedule does not have, and steps that do not fit."""
        from carpool.train.lr_schedules import decay_steps, learning_rate, options_of

        name, known, where = self.lr_scheduler_type, options_of(self.lr_scheduler_type), "training.lr_scheduler_kwargs"
        if close := self.lr_scheduler_kwargs.keys() & {"min_lr", "min_lr_rate", "min_lr_ratio", "lr_end"}:
            raise ValueError(f"{where}.{min(close)}: the lowest rate of every schedule is training.min_lr_ratio")
        check_options(where, self.lr_scheduler_kwargs, f"schedule {name!r} has {listed_options(known)}", known)
        if self.max_steps is None:
            return
        if self.decay_from is not None and not self.warmup() <= self.decay_from < self.max_steps:
            raise ValueError(
                f"training.decay_from = {self.decay_from}: expected a step between the end of warm-up "
                f"({self.warmup()}) and training.max_steps = {self.max_steps}"
            )
        asked = self.lr_scheduler_kwargs.get("num_decay_steps")
        if self.decay_from is not None and asked is not None:
            left, decay = self.max_steps - self.decay_from, decay_steps(asked, self.max_steps)
            if decay != left:
                raise ValueError(
                    f"training.decay_from = {self.decay_from} lets the rate fall for {left} steps, to max_steps = "
                    f"{self.max_steps}, and {where}.num_decay_steps = {asked:g} for {decay:g}: leave one of them out"
                )
        try:
            learning_rate(self.max_steps, self)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
