"""What a run of `carpool train` is made of: ten frozen sections, every key with its type, limits and meaning.

    [model]        which transformers MoE model: a checkpoint folder, or an architecture trained from scratch
    [data]         which text, how it is tokenized, how long a sequence is
    [adapter]      adapters of low rank, trained in the place of the model
    [training]     optimizer, schedule, steps, and where the run is written
    [parallelism]  how many ranks, and how FSDP, tensor and expert parallelism divide them
    [moe]          how tokens ride to their experts
    [codec]        how rows become bytes on their way
    [nvlink]       how the transport of that name works
    [memory]       what is kept for the backward, and where
    [placement]    where experts live while a run goes on

Each section has a file, `schema_SECTION.py`; [codec] and [nvlink] are beside [moe]. Plug-in packages add sections
(`carpool.train.extensions`): a file is read into a `config_type()`, which is `Config` with these. What several sections
say together is checked here. Names are transformers' own wherever transformers has one. `Config()` without
arguments is the demo: a small OLMoE-shaped model trained on the Python standard library's source code by four
processes of this machine.

Reading a file, overriding keys and the errors that name key, value and place are `carpool.train.config`'s task;
a validator here only says what is wrong with values that have the right type.

`None` means "not set: derived, or off", as each key's description says. TOML has no null, so in files and on the
command line it is written as the word "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Self

from pydantic import Field, create_model, model_validator

from carpool.parallel.combinations import check_supported
from carpool.parallel.schedules import check_micro_batches
from carpool.train.config.schema_adapter import AdapterSection
from carpool.train.config.schema_base import Section, toml_value
from carpool.train.config.schema_data import DataSection
from carpool.train.config.schema_memory import MemorySection
from carpool.train.config.schema_model import DEMO_MODEL, ModelSection
from carpool.train.config.schema_moe import CodecSection, MoeSection, NvlinkSection
from carpool.train.config.schema_parallelism import ParallelismSection
from carpool.train.config.schema_placement import PlacementSection
from carpool.train.config.schema_training import TrainingSection
from carpool.train.extensions import EXTENSIONS, Extension, extensions_in_use


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
        if self.parallelism.pp_size > 1 and self.parallelism.plan is None:  # which chooses how many
            micro_batches = self.training.gradient_accumulation_steps
            check_micro_batches(self.parallelism.pp_schedule, self.parallelism.pp_size, micro_batches)
        return self

    @model_validator(mode="after")
    def _keeps_what_experts_can(self) -> Self:
        if self.memory.expert_activations == "recompute" and self.moe.experts not in ("auto", "grouped"):
            raise ValueError(
                "memory.expert_activations = 'recompute' is of grouped experts, and moe.experts = "
                f"{self.moe.experts!r}: leave one "
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
            if codecs.inter_node != "all":
                raise ValueError(
                    "codec.inter_node = 'nodes' is of a transport with two hops: moe.transport=hierarchical"
                )
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
        if moves and training.optimizer_offload != "none":
            raise ValueError(
                f'training.optimizer_offload = "{training.optimizer_offload}" keeps state where it is, but '
                "placement.every "
                "moves experts with theirs between GPUs: leave one of them out"
            )
        if moves and self.placement.replicas and training.optimizer_in_backward:
            raise ValueError(
                "training.optimizer_in_backward = true uses each gradient once it is there, but replicas of experts "
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
        if self.training.optimizer_in_backward:
            raise ValueError(
                "training.optimizer_in_backward = true uses each gradient once it is there, but those of adapters are "
                "added up over ranks after that: use training.optimizer_in_backward = false"
            )
        if self.adapter.base_dtype is not None:
            self._check_base()
        if self.adapter.adapts_experts:
            if self.moe.experts == "fp8":
                raise ValueError("moe.experts = 'fp8' has no adapters: use 'grouped', or other adapter.targets")
            if not self.moe.rides_whole:
                raise ValueError(
                    f"moe.schedule = {self.moe.schedule!r} has no adapters: use 'chunks', or other adapter.targets"
                )
        return self

    def _check_base(self) -> None:
        """Raise ValueError for what experts cannot do that are quantised."""
        moe, memory, placement = self.moe, self.memory, self.placement
        refused = {
            f"moe.experts = {moe.experts!r}": moe.experts not in ("auto", "grouped", "reference"),
            f"moe.schedule = {moe.schedule!r}": not moe.rides_whole,
            f"moe.layout = {moe.layout!r}": moe.layout != "contiguous",
            "placement.every": placement.every is not None,
            f"memory.experts = {memory.experts!r}": memory.experts != "device",
        }
        if found := [name for name, wrong in refused.items() if wrong]:
            raise ValueError(
                f"{found[0]} cannot be used with adapter.base_dtype = {self.adapter.base_dtype!r}: experts that are "
                "quantised stay on their GPU, in order, and grouped products dequantise them; leave one of them out"
            )

    @model_validator(mode="after")
    def _checked_by_extensions(self) -> Self:
        for extension in extensions_in_use(self):
            extension.check(self)
        return self

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


def config_type() -> type[Config]:
    """`Config` with the sections of extensions.

    Raises:
        ValueError: an extension has the name of another section."""
    return _with_sections(tuple(EXTENSIONS.values()))


@lru_cache
def _with_sections(extensions: tuple[type[Extension], ...]) -> type[Config]:
    if not extensions:
        return Config
    sections: dict[str, Any] = {}
    for one in extensions:
        if one.name in Config.model_fields:
            raise ValueError(f"extension {one.name!r} has the name of a section that Carpool has; use another name")
        sections[one.name] = (one.section, Field(default_factory=one.section, description=one.help))
    made = create_model("Config", __base__=Config, __module__=__name__, **sections)
    # Ranks get their configuration by pickle, which finds no class that was made while running.
    made.__reduce__ = lambda self: (_from_sections, (self.__dict__,))  # type: ignore[method-assign,assignment]
    return made


def _from_sections(sections: dict[str, Section]) -> Config:
    return config_type().model_construct(None, **sections)


def keys() -> Iterator[tuple[str, type[Section], str]]:
    """Every `(section, class of the section, key)` that a configuration has."""
    for section, field in config_type().model_fields.items():
        cls = field.annotation
        assert isinstance(cls, type) and issubclass(cls, Section)
        for key in cls.model_fields:
            yield section, cls, key
