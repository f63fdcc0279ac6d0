"""What a run of `carpool train` is made of: seven frozen sections, every key with its type, limits and meaning.

    [model]        which transformers MoE model: a checkpoint folder, or an architecture trained from scratch
    [data]         which text, how it is tokenized, how long a sequence is
    [training]     optimizer, schedule, steps, and where the run is written
    [parallelism]  how many ranks, and how FSDP, tensor and expert parallelism divide them
    [moe]          how tokens ride to their experts
    [nvlink]       how the transport of that name works
    [placement]    where experts live while a run goes on

Names are transformers' own wherever transformers has one. `Config()` without arguments is the demo: a small
OLMoE-shaped model trained on the Python standard library's source code by four processes of this machine.

Reading a file, overriding keys and the errors that name key, value and place are `carpool.train.config`'s task;
a validator here only says what is wrong with values that have the right type.

`None` means "not set: derived, or off", as each key's description says. TOML has no null, so in files and on the
command line it is written as the word "none".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carpool.parallel.degrees import Degrees
from carpool.train.config.schema_base import Section, Texts, toml_value
from carpool.train.config.schema_moe import MoeSection, NvlinkSection, PlacementSection

DEMO_MODEL: dict[str, Any] = {
    "model_type": "olmoe",
    "config": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        # So narrow a model starts from larger weights than transformers' 0.02.
        "initializer_range": 0.06,
        "router_aux_loss_coef": 0.1,
        # One table for both ends: with few steps, each byte is learned from twice as much.
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
}


class ModelSection(Section):
    """Which model: `path`, or `architecture` / `model_type` with `config`."""

    path: str | None = Field(
        default=None,
        description="Checkpoint folder in transformers' format, loaded by from_pretrained. none: from scratch.",
    )
    architecture: str | None = Field(
        default=None, description="transformers class to build from scratch, such as OlmoeForCausalLM."
    )
    model_type: str | None = Field(
        default=None, description="Instead of architecture: transformers' model_type, such as olmoe."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Any key of the model's transformers configuration class, for a model from scratch. Without "
        "a vocab_size, the tokenizer's is used.",
    )
    num_experts_per_tok: int | None = Field(
        default=None,
        gt=0,
        description="Experts that each token visits (top-k), from scratch. none: as the configuration says.",
    )
    attn_implementation: str | None = Field(
        default=None,
        description="Attention of transformers: sdpa, eager, flash_attention_2, ... none: transformers chooses.",
    )
    experts_implementation: str | None = Field(
        default=None, description="Experts of transformers: eager, batched_mm, grouped_mm. none: transformers chooses."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="dtype in which parameters are stored and updated. none: float32."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "architecture", "model_type") if getattr(self, name) is not None]
        if not given:
            raise ValueError("model needs a path (checkpoint folder) or an architecture or model_type (from scratch)")
        if len(given) > 1:
            raise ValueError(f"model.{' and model.'.join(given)} contradict each other: give only one of them")
        return self


class DataSection(Section):
    """Which text, and how it becomes sequences."""

    train: Texts = Field(
        default=("stdlib",),
        description="Files, folders or globs: text, JSON-lines (.jsonl, .json, also .gz), Parquet, local Hugging Face "
        'dataset folders. "stdlib" is the source code of this machine\'s Python: real text, no download.',
    )
    eval: Texts | None = Field(
        default=None, description="Held-out data, given as train is. none: eval_fraction of train."
    )
    eval_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="Share of train's documents that is held out, whole, when eval is none."
    )
    eval_max_sequences: int | None = Field(
        default=170, gt=0, description="At most this many held-out sequences are evaluated, evenly spread. none: all."
    )
    tokenizer: str | None = Field(
        default=None,
        description='"bytes" (built in), or a tokenizer.json, or a folder that holds one. none: the one in model.path '
        "if there is one, otherwise bytes.",
    )
    eos_token: str | None = Field(
        default=None, description="Token put after each document. none: as the tokenizer's own files say."
    )
    text_field: str = Field(
        default="text", description="Field that holds the text in JSON-lines, Parquet and datasets."
    )
    sequence_length: int = Field(
        default=96, ge=2, description="Tokens in one sequence; documents are packed into these."
    )
    max_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Stop reading train after this many bytes of text (whole documents). none: read all.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Where tokens are kept between runs. none: $XDG_CACHE_HOME/carpool or ~/.cache/carpool.",
    )

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if not self.train:
            raise ValueError('data.train is empty: name files, folders or globs, or "stdlib"')
        return self


class TrainingSection(Section):
    """Optimizer, schedule, steps and the run's folder; transformers' names."""

    output_dir: str = Field(
        default="runs/demo", description="Folder of this run: metrics, checkpoints, resolved config."
    )
    max_steps: int = Field(default=180, gt=0, description="Optimizer steps of the whole run, resumed parts included.")
    stop_at_step: int | None = Field(
        default=None,
        gt=0,
        description="Leave off after this step, with a checkpoint; the schedule still runs to max_steps. none: do not.",
    )
    per_device_train_batch_size: int = Field(
        default=12, gt=0, description="Sequences per data-parallel rank and micro-batch."
    )
    per_device_eval_batch_size: int = Field(default=8, gt=0, description="The same, in evaluation.")
    gradient_accumulation_steps: int = Field(default=1, gt=0, description="Micro-batches per optimizer step.")
    learning_rate: float = Field(default=5e-3, ge=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="How the learning rate falls after warm-up, until max_steps."
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
    max_grad_norm: float = Field(
        default=1.0,
        ge=0,
        description="Gradients are clipped to this global norm over all ranks and experts. 0: no clipping.",
    )
    bf16: bool | None = Field(
        default=None,
        description="Compute in bfloat16 (parameters keep model.dtype). none: true on GPUs, false on CPUs.",
    )
    freeze: Literal["dense"] | None = Field(
        default=None,
        description="dense: train experts and routers alone, as for fine-tuning with moe.limit_ranks. none: all.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward to save memory.")
    checkpoint_rides: Literal["keep", "repeat"] = Field(
        default="keep",
        description="With gradient_checkpointing, keep: rows do not travel and experts do not compute again, what they "
        "keep stays (moe.recompute_experts: the rows alone). repeat: they do, and nothing of them is kept.",
    )
    torch_compile: bool = Field(
        default=False,
        description="Compile each decoder layer (torch.compile): takes a minute at the start, then steps are shorter, "
        "most where the GPU waits for the host.",
    )
    torch_compile_backend: str = Field(default="inductor", description="Of torch.compile.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the initial weights and of the order of the data."
    )
    full_determinism: bool = Field(
        default=False,
        description="On GPUs too, two runs are bitwise equal, by PyTorch's deterministic algorithms: the backward of "
        "fused attention is slower, and adds in a fixed order. On CPUs runs are equal anyway.",
    )
    logging_steps: int = Field(default=1, gt=0, description="Steps between lines of metrics.")
    eval_steps: int | None = Field(
        default=90, gt=0, description="Steps between evaluations; one more at the end. none: only at the end."
    )
    eval_on_start: bool = Field(default=True, description="Also evaluate before the first step.")
    sample_prompt: str | None = Field(
        default="def ", description="A text is sampled from this at each evaluation. none: no."
    )
    sample_tokens: int = Field(default=32, gt=0, description="Tokens of that sample.")
    save_steps: int | None = Field(
        default=90, gt=0, description="Steps between checkpoints; one more at the end. none: only at the end."
    )
    save_total_limit: int | None = Field(default=2, gt=0, description="Newest checkpoints that are kept. none: all.")
    save_pretrained: bool = Field(
        default=True,
        description="At the end, also write the model as a plain transformers checkpoint, the folder model of the run.",
    )
    resume_from_checkpoint: str | None = Field(
        default=None, description='"last" (newest good one in output_dir), or a checkpoint\'s folder. none: start anew.'
    )
    report_to: Texts = Field(
        default=(),
        description="tensorboard, wandb, or others that transformers knows; one or a list. none: JSON-lines only.",
    )
    compare_repetitions: int = Field(
        default=5, gt=0, description="With --compare: how often each transport's probe step is repeated, interleaved."
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="Peak FLOP/s of one device, for MFU. none: the known figure of this GPU, if there is.",
    )

    def warmup(self) -> int:
        """Steps of warm-up: `warmup_steps` itself, or that share of `max_steps`, rounded up, if it is below 1."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return -int(-self.max_steps * self.warmup_steps // 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warmup() > self.max_steps:
            raise ValueError(
                f"training.warmup_steps = {self.warmup_steps:g} is more than training.max_steps = {self.max_steps}: "
                "warm-up would never end; lower the first or raise the second"
            )
        return self


class ParallelismSection(Section):
    """How ranks are divided: dp_replicate_size x fsdp_size x tp_size = ranks; experts spread over ep_size of them."""

    num_ranks: int | None = Field(
        default=None,
        gt=0,
        description="Processes to start on this machine; torchrun and Slurm decide for themselves. "
        "none: one per GPU, or 4 on CPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is a GPU, otherwise cpu."
    )
    fsdp_size: int | None = Field(
        default=None,
        gt=0,
        description="Ranks that shard one copy of the parameters and see distinct data. none: all left.",
    )
    tp_size: int = Field(default=1, gt=0, description="Tensor-parallel ranks.")
    dp_replicate_size: int = Field(
        default=1, gt=0, description="Copies of the sharded model (HSDP), as in transformers."
    )
    ep_size: int | None = Field(
        default=None,
        gt=0,
        description="Ranks over which a layer's experts are spread. none: the most that divides both the ranks of one "
        "copy and the number of experts.",
    )
    ranks_per_node: int | None = Field(
        default=None,
        gt=0,
        description="Consecutive ranks that share a node, for limits by node and for the placement of experts. Set it "
        "where the launcher does not tell, or to try a layout for several nodes on one. none: as the launcher says.",
    )
    timeout_seconds: int = Field(default=600, gt=0, description="A collective that takes longer than this is an error.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ep_size is not None and self.ep_size > 1 and self.ep_size % self.tp_size:
            raise ValueError(
                f"parallelism.ep_size = {self.ep_size} must be a multiple of parallelism.tp_size = {self.tp_size}"
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


class Config(Section):
    """The whole configuration; `Config()` is the demo."""

    model: ModelSection = Field(
        default_factory=lambda: ModelSection(**DEMO_MODEL), description="Which transformers MoE model."
    )
    data: DataSection = Field(default_factory=DataSection, description="Which text, and how it becomes sequences.")
    training: TrainingSection = Field(default_factory=TrainingSection, description="Optimizer, schedule, steps.")
    parallelism: ParallelismSection = Field(default_factory=ParallelismSection, description="How ranks are divided.")
    moe: MoeSection = Field(default_factory=MoeSection, description="How tokens ride to their experts.")
    nvlink: NvlinkSection = Field(default_factory=NvlinkSection, description="How the transport nvlink works.")
    placement: PlacementSection = Field(
        default_factory=PlacementSection, description="Where experts live while the run goes on. Off by default."
    )

    @model_validator(mode="after")
    def _delays_something(self) -> Self:
        if self.training.torch_compile and self.moe.delay_dense:
            raise ValueError(
                "moe.delay_dense puts off weight gradients of layers that run eagerly, and training.torch_compile "
                "compiles them all: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _is_placed(self) -> Self:
        if self.placement.policy == "place" and self.moe.layout == "contiguous":
            raise ValueError(
                f"placement.policy = 'place' needs a layout: moe.layout=FILE, which `carpool place TRACE --ranks N "
                f"--solvers {self.placement.solver}` writes"
            )
        return self

    def to_toml(self, comments: bool = False) -> str:
        """Every key as TOML, which `load_config` reads back to an equal Config; with `comments`, each explained."""
        blocks = []
        for name, field in type(self).model_fields.items():
            section = getattr(self, name)
            lines = [f"# {field.description}"] if comments else []
            lines.append(f"[{name}]")
            tables: list[str] = []
            for key, about in type(section).model_fields.items():
                value = getattr(section, key)
                into = tables if isinstance(value, dict) else lines
                if comments:
                    into.append(f"# {about.description}")
                if isinstance(value, dict):
                    into.append(f"[{name}.{key}]")
                    into.extend(f"{toml_value(k, as_key=True)} = {toml_value(v)}" for k, v in value.items())
                else:
                    into.append(f"{key} = {toml_value(value)}")
            blocks.append("\n".join([*lines, *([""] if tables else []), *tables]))
        return "\n\n".join(blocks) + "\n"


def keys() -> Iterator[tuple[str, type[Section], str]]:
    """Every `(section, class of the section, key)` that a configuration has."""
    for section, field in Config.model_fields.items():
        cls = field.annotation
        assert isinstance(cls, type) and issubclass(cls, Section)
        for key in cls.model_fields:
            yield section, cls, key
