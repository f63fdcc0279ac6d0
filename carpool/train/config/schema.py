"""What a run of `carpool train` is made of: eight frozen sections, every key with its type, limits and meaning.

    [model]        which transformers MoE model: a checkpoint folder, or an architecture trained from scratch
    [data]         which text, how it is tokenized, how long a sequence is
    [adapter]      adapters of low rank, trained in the place of the model
    [training]     optimizer, schedule, steps, and where the run is written
    [parallelism]  how many ranks, and how FSDP, tensor and expert parallelism divide them
    [moe]          how tokens ride to their experts
    [nvlink]       how the transport of that name works
    [memory]       what is kept for the backward, and where
    [placement]    where experts live while a run goes on

Names are transformers' own wherever transformers has one. `Config()` without arguments is the demo: a small
OLMoE-shaped model trained on the Python standard library's source code by four processes of this machine.

Reading a file, overriding keys and the errors that name key, value and place are `carpool.train.config`'s task;
a validator here only says what is wrong with values that have the right type.

`None` means "not set: derived, or off", as each key's description says. TOML has no null, so in files and on the
command line it is written as the word "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carpool.parallel.combinations import check_supported
from carpool.train.config.published import is_configuration_alone, read_keys
from carpool.train.config.schema_adapter import AdapterSection
from carpool.train.config.schema_base import Section, Texts, toml_value
from carpool.train.config.schema_memory import MemorySection
from carpool.train.config.schema_moe import CodecSection, MoeSection, NvlinkSection
from carpool.train.config.schema_parallelism import ParallelismSection
from carpool.train.config.schema_placement import PlacementSection
from carpool.train.config.schema_training import TrainingSection

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
    """Which model: `path`, or `config` as published, or `architecture` / `model_type` with keys in `config`.

    Once read, `config` holds all keys, and `model_type` is set: a run's settings need no other file.
    """

    path: str | None = Field(
        default=None,
        description="Folder of a checkpoint in transformers' format, which from_pretrained loads. A folder with a "
        "config.json and no weights, or none: a model from scratch.",
    )
    architecture: str | None = Field(
        default=None, description="For a model from scratch: the class of transformers, such as OlmoeForCausalLM."
    )
    model_type: str | None = Field(
        default=None, description="Instead of architecture: transformers' model_type, such as olmoe."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="For a model from scratch: a published config.json (its path, or a short name such as "
        'qwen3-30b-a3b), or keys of one as a table, which names what it changes under "from". vocab_size is the '
        "tokenizer's unless given.",
    )
    num_experts_per_tok: int | None = Field(
        default=None,
        gt=0,
        description="For a model from scratch: experts that each token visits (top-k). none: as the configuration "
        "says.",
    )
    travel_size: int | None = Field(
        default=None,
        gt=0,
        description="ANOTHER MODEL, for one from scratch: rows are projected to so many elements before they travel, "
        "experts compute with rows of that size, and sums are projected back (BigMac). It has other parameters, and is "
        "not exported to Transformers, which does not know it. none: rows travel as they are.",
    )
    attn_implementation: str | None = Field(
        default=None,
        description="Attention of transformers: sdpa, eager, flash_attention_2 and others. none: transformers chooses, "
        "but flex_attention on GPUs for models that cannot take sdpa, such as gpt-oss, and for packed examples "
        "attention that is told where they end and needs no mask (carpool_documents).",
    )
    experts_implementation: str | None = Field(
        default=None, description="Experts of transformers: eager, batched_mm, grouped_mm. none: transformers chooses."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype in which parameters are stored and updated; training.bf16 says in which they compute. "
        "none: float32.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_config(cls, data: Any) -> Any:
        config = data.get("config") if isinstance(data, dict) else None
        if not isinstance(config, (str, dict)):
            return data
        keys = read_keys(config)
        model_type = keys.pop("model_type", None)
        if model_type is None:
            return {**data, "config": keys}
        if (data.get("model_type") or model_type) != model_type:
            raise ValueError(
                f"model.model_type = {data['model_type']!r} contradicts model.config, whose model_type is "
                f"{model_type!r}: leave model.model_type out"
            )
        return {**data, "config": keys, "model_type": model_type}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "architecture", "model_type") if getattr(self, name) is not None]
        if not given:
            raise ValueError(
                "model needs a path (a checkpoint's folder), a published configuration (model.config = "
                '"qwen3-30b-a3b", or a config.json that says its model_type), or an architecture or model_type'
            )
        if len(given) > 1:
            raise ValueError(f"model.{' and model.'.join(given)} contradict each other: give only one of them")
        if self.travel_size is not None and not self.from_scratch:
            raise ValueError(
                f"model.travel_size makes another model, but model.path = {self.path} names a checkpoint: leave one out"
            )
        return self

    @property
    def from_scratch(self) -> bool:
        """Does the model start from random weights?"""
        return self.path is None or is_configuration_alone(Path(self.path))


class DataSection(Section):
    """Which text or conversations, and how they become sequences."""

    train: Texts = Field(
        default=("stdlib",),
        description="Files, folders or globs: text, JSON-lines (.jsonl, .json, also .gz), Parquet, local Hugging Face "
        'dataset folders. "stdlib" is the source code of this machine\'s Python: real text, no download.',
    )
    eval: Texts | None = Field(
        default=None, description="Held-out data, given in the same way. none: eval_fraction of train."
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of train's rows (documents, conversations) that is held out when eval is none.",
    )
    eval_max_sequences: int | None = Field(
        default=170,
        gt=0,
        description="The most held-out sequences that are evaluated, evenly spread over the held-out data. none: all.",
    )
    format: Literal["text", "messages", "prompt"] | None = Field(
        default=None,
        description="What a row is: text, messages (a conversation), or prompt (a prompt and its completion). none: "
        "as the fields of the first row say.",
    )
    tokenizer: str | None = Field(
        default=None,
        description='"bytes" (built in), the path of a tokenizer.json, or a folder that holds one. none: the '
        "tokenizer in model.path if there is one, otherwise bytes.",
    )
    eos_token: str | None = Field(
        default=None, description="Token put after each document. none: the one that the tokenizer's files name."
    )
    text_field: str = Field(
        default="text", description="Field that holds the text in JSON-lines, Parquet and datasets."
    )
    messages_field: str = Field(
        default="messages", description="Field that holds the messages of a conversation; tools are in the field tools."
    )
    prompt_field: str = Field(default="prompt", description="Field that holds a prompt: text, or messages.")
    completion_field: str = Field(default="completion", description="Field that holds its completion, in the same way.")
    chat_template: str | None = Field(
        default=None, description="A Jinja file that writes conversations. none: the tokenizer's own chat template."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="What the chat template is told beside, such as {enable_thinking = false}."
    )
    loss: Literal["answers", "all"] = Field(
        default="answers",
        description="What is learned of conversations and prompts: the assistant's answers and completions, or all "
        "tokens. Of plain text, all.",
    )
    turns: Literal["together", "apart"] = Field(
        default="together",
        description="A conversation is one example, or each of its answers is one, with the conversation before it: "
        "for chat templates that leave out earlier thinking.",
    )
    packing: Literal["stream", "examples", "off"] | None = Field(
        default=None,
        description="stream: documents end to end, cut into sequences. examples: whole examples in a sequence, none "
        "sees another. off: one example in a sequence. none: stream for text, otherwise examples.",
    )
    too_long: Literal["refuse", "truncate", "split"] = Field(
        default="refuse",
        description="What becomes of an example that is longer than a sequence: an error before training, or its end "
        "is cut off, or its parts are examples.",
    )
    sequence_length: int = Field(
        default=96, ge=2, description="Tokens in one sequence. Documents or examples are packed into these."
    )
    max_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Read at most this many bytes of train's text, in whole documents. none: all.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Where tokens are kept between runs. none: $XDG_CACHE_HOME/carpool or ~/.cache/carpool.",
    )

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if not self.train:
            raise ValueError('data.train is empty: name files, folders or globs, or "stdlib"')
        if self.turns == "apart" and self.loss == "all":
            raise ValueError(
                'data.turns = "apart" makes an example of each answer, but data.loss = "all" learns the conversation '
                "before it too, and so again with each answer; leave one of them out"
            )
        return self


class Config(Section):
    """The whole configuration; `Config()` is the demo."""

    model: ModelSection = Field(
        default_factory=lambda: ModelSection(**DEMO_MODEL), description="Which transformers MoE model."
    )
    data: DataSection = Field(default_factory=DataSection, description="Which text, and how it becomes sequences.")
    adapter: AdapterSection = Field(
        default_factory=AdapterSection, description="Adapters of low rank beside the frozen model. Off by default."
    )
    training: TrainingSection = Field(default_factory=TrainingSection, description="Optimizer, schedule, steps.")
    parallelism: ParallelismSection = Field(default_factory=ParallelismSection, description="How ranks are divided.")
    moe: MoeSection = Field(default_factory=MoeSection, description="How tokens ride to their experts.")
    codec: CodecSection = Field(
        default_factory=CodecSection, description="How rows become bytes on their way. Exact by default."
    )
    nvlink: NvlinkSection = Field(default_factory=NvlinkSection, description="How the transport nvlink works.")
    memory: MemorySection = Field(
        default_factory=MemorySection, description="What is kept for the backward, and where."
    )
    placement: PlacementSection = Field(
        default_factory=PlacementSection, description="Where experts live while the run goes on. Off by default."
    )

    def check_supported(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if axes of these sizes and these settings do not go together."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section}
        check_supported(sizes, settings)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self.check_supported(self.parallelism.sizes)
        return self

    @model_validator(mode="after")
    def _keeps_what_experts_can(self) -> Self:
        if self.memory.hidden == "recompute" and self.moe.experts not in ("auto", "grouped"):
            raise ValueError(
                f"memory.hidden = 'recompute' is of grouped experts, and moe.experts = {self.moe.experts!r}: leave one "
                "of them out"
            )
        return self

    @model_validator(mode="after")
    def _has_codecs(self) -> Self:
        if self.codec == CodecSection():
            return self
        from carpool.transport import check_codecs

        codecs, name = self.codec.codecs, self.moe.transport
        if name == "auto":
            if codecs.hop != "all":
                raise ValueError("codec.hop = 'nodes' is of a transport with two hops: moe.transport=hierarchical")
        else:
            check_codecs(name, codecs)
        return self

    @model_validator(mode="after")
    def _is_placed(self) -> Self:
        if self.placement.policy == "place" and self.moe.layout == "contiguous":
            raise ValueError(
                f"placement.policy = 'place' needs a layout: moe.layout=FILE, which `carpool place TRACE --ranks N "
                f"--solvers {self.placement.solver}` writes"
            )
        return self

    @model_validator(mode="after")
    def _experts_stay(self) -> Self:
        moves, training = self.placement.every is not None, self.training
        if moves and training.optimizer_state != "device":
            raise ValueError(
                f'training.optimizer_state = "{training.optimizer_state}" keeps state where it is, but placement.every '
                "moves experts with theirs between GPUs: leave one of them out"
            )
        if moves and self.placement.replicas and training.gradients == "consumed":
            raise ValueError(
                'training.gradients = "consumed" uses each gradient once it is there, but replicas of experts '
                "(placement.replicas) add several to one: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _can_adapt(self) -> Self:
        if self.adapter.kind is None:
            return self
        if self.model.from_scratch:
            raise ValueError("adapter.kind needs a model to adapt: name a checkpoint's folder in model.path")
        if self.training.freeze is not None:
            raise ValueError("training.freeze and adapter.kind contradict each other: adapters freeze all of the model")
        if self.training.gradients == "consumed":
            raise ValueError(
                'training.gradients = "consumed" uses each gradient once it is there, but those of adapters are added '
                'up over ranks after that: use training.gradients = "kept"'
            )
        if self.adapter.base_dtype is not None:
            self._check_base()
        if {"experts", "all-linear"} & set(self.adapter.targets):
            if self.moe.experts == "fp8":
                raise ValueError("moe.experts = 'fp8' has no adapters: use 'grouped', or other adapter.targets")
            if self.moe.schedule == "tiles":
                raise ValueError("moe.schedule = 'tiles' has no adapters: use 'chunks', or other adapter.targets")
        return self

    def _check_base(self) -> None:
        """Raise ValueError for what experts cannot do that are quantised."""
        moe, memory, placement = self.moe, self.memory, self.placement
        refused = {
            f"moe.experts = {moe.experts!r}": moe.experts not in ("auto", "grouped", "reference"),
            "moe.schedule = 'tiles'": moe.schedule == "tiles",
            f"moe.layout = {moe.layout!r}": moe.layout != "contiguous",
            "placement.every": placement.every is not None,
            f"memory.experts = {memory.experts!r}": memory.experts != "device",
        }
        if found := [name for name, wrong in refused.items() if wrong]:
            raise ValueError(
                f"{found[0]} cannot be used with adapter.base_dtype = {self.adapter.base_dtype!r}: experts that are "
                "quantised stay on their GPU, in order, and grouped products dequantise them; leave one of them out"
            )

    def settings_of_transport(self, name: str) -> dict[str, Any]:
        """What is said to a transport: to nvlink in its section, to another where moe.transport names it."""
        if name == "nvlink":
            return self.nvlink.model_dump()
        settings = self.moe.transport_options if name == self.moe.transport else {}
        # Which has nvlink inside.
        return {**settings, "nvlink": self.nvlink.model_dump()} if name == "hierarchical" else settings

    def to_toml(self, comments: bool = False, sources: Mapping[tuple[str, str], str] | None = None) -> str:
        """Every key as TOML, which `load_config` reads back to an equal Config.

        Args:
            comments: each key is explained.
            sources: what is said at the end of a key's line, by (section, key).
        """
        blocks = []
        for name, field in type(self).model_fields.items():
            section = getattr(self, name)
            lines = [f"# {field.description}"] if comments else []
            lines.append(f"[{name}]")
            tables: list[str] = []
            for key, about in type(section).model_fields.items():
                value = getattr(section, key)
                into = tables if isinstance(value, dict) else lines
                source = f"  # {sources[name, key]}" if sources and (name, key) in sources else ""
                if comments:
                    into.append(f"# {about.description}")
                if isinstance(value, dict):
                    into.append(f"[{name}.{key}]{source}")
                    into.extend(f"{toml_value(k, as_key=True)} = {toml_value(v)}" for k, v in value.items())
                else:
                    into.append(f"{key} = {toml_value(value)}{source}")
            blocks.append("\n".join([*lines, *([""] if tables else []), *tables]))
        return "\n\n".join(blocks) + "\n"


def keys() -> Iterator[tuple[str, type[Section], str]]:
    """Every `(section, class of the section, key)` that a configuration has."""
    for section, field in Config.model_fields.items():
        cls = field.annotation
        assert isinstance(cls, type) and issubclass(cls, Section)
        for key in cls.model_fields:
            yield section, cls, key
