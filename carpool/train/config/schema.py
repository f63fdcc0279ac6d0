"""What a run of `carpool train` is made of: eleven frozen sections, every key with its type, limits and meaning.

    [model]        which transformers MoE model: a checkpoint folder, or an architecture trained from scratch
    [data]         which data, how it is tokenized, how long a sequence is
    [adapter]      adapters of low rank, trained in the place of the model
    [distillation] learning from a teacher's probabilities
    [training]     optimizer, schedule, steps, and where the run is written
    [parallelism]  how many ranks, and how FSDP, tensor and expert parallelism divide them
    [moe]          how tokens are routed and sent, and how experts compute
    [codec]        in which format hidden states are sent
    [nvlink]       how the transport of that name works
    [memory]       which activations are saved for the backward, and where
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

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Self

from pydantic import Field, create_model, model_validator

from carpool.parallel.degrees import Degrees
from carpool.parallel.schedules import check_micro_batches
from carpool.train.config.declarations import Declared, declared
from carpool.train.config.schema_adapter import AdapterSection
from carpool.train.config.schema_base import Section, toml_value
from carpool.train.config.schema_data import DataSection
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.config.schema_memory import MemorySection
from carpool.train.config.schema_model import DEMO_MODEL, ModelSection
from carpool.train.config.schema_moe import CodecSection, MoeSection, NvlinkSection
from carpool.train.config.schema_parallelism import ParallelismSection
from carpool.train.config.schema_placement import PlacementSection
from carpool.train.config.schema_training import TrainingSection
from carpool.train.extensions import EXTENSIONS, Extension, extensions_in_use


class Config(Section):
    """The whole configuration; `Config()` is the demo."""

    model: ModelSection = Field(default_factory=lambda: ModelSection(**DEMO_MODEL))
    """Which transformers MoE model."""
    data: DataSection = Field(default_factory=DataSection)
    """Which data, and how it becomes sequences."""
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    """Adapters of low rank beside the frozen model. Off by default."""
    distillation: DistillationSection = Field(default_factory=DistillationSection)
    """Learning from a teacher's probabilities. Off by default."""
    training: TrainingSection = Field(default_factory=TrainingSection)
    """Optimizer, schedule, steps."""
    parallelism: ParallelismSection = Field(default_factory=ParallelismSection)
    """How ranks are divided."""
    moe: MoeSection = Field(default_factory=MoeSection)
    """How tokens are routed and sent, and how experts compute."""
    codec: CodecSection = Field(default_factory=CodecSection)
    """In which format hidden states are sent. Exact by default."""
    nvlink: NvlinkSection = Field(default_factory=NvlinkSection)
    """How the transport nvlink works."""
    memory: MemorySection = Field(default_factory=MemorySection)
    """Which activations are saved for the backward, and where experts are."""
    placement: PlacementSection = Field(default_factory=PlacementSection)
    """Where experts live while the run goes on. Off by default."""

    @property
    def declared(self) -> Declared:
        """What its settings declare."""
        return declared(type(self))

    def flat(self) -> dict[str, Any]:
        """Values by SECTION.KEY."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {f"{name}.{key}": value for name, section in sections.items() for key, value in section}

    def changed(self, section: str, **values: Any) -> Self:
        """The same with other settings in a section, which are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def micro_batch_shape(self) -> tuple[int, int]:
        """Sequences of a data-parallel rank, on the mean, and tokens of each."""
        return self.training.per_device_train_batch_size, self.data.sequence_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of a data-parallel rank in one step."""
        return self.training.rank_sequences * self.data.sequence_length

    @property
    def runs_halves(self) -> bool:
        """Whether two halves of a micro-batch run at the same time: there is no other micro-batch."""
        return self.moe.two_batch and self.training.gradient_accumulation_steps == 1

    def batch_sizes(self, degrees: Degrees) -> tuple[int, ...]:
        """Sequences in a micro-batch of each data-parallel rank."""
        training = self.training
        mean, total = training.per_device_train_batch_size, training.micro_batch_sequences
        return self.parallelism.batch_sizes(mean, degrees, total)

    def check_supported(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if settings do not go together, with axes of parallelism of these sizes."""
        self.declared.check({**self.flat(), **{f"parallelism.{axis}_size": size for axis, size in sizes.items()}})

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self.declared.check(self.flat())
        if (tokens := math.prod(self.micro_batch_shape)) >= 2**31:
            raise ValueError(
                f"training.per_device_train_batch_size * data.sequence_length = {tokens:,}: lower one of them"
            )
        if self.parallelism.pp_size > 1 and self.parallelism.plan is None:  # which chooses how many
            micro_batches = self.training.gradient_accumulation_steps
            check_micro_batches(self.parallelism.pp_schedule, self.parallelism.pp_size, micro_batches)
        if self.adapter.kind is not None and (folder := self.model.bare_folder) is not None:
            raise ValueError(f"adapter.kind needs a model to adapt, and model.path = {folder} has no weights")
        if self.adapter.is_used and (why := self.training.ablest_optimizer().refusals.get("adapter.kind")):
            raise ValueError(f'adapters are not trained by training.optimizer = "{self.training.optimizer}": {why}')
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
    def _checked_by_extensions(self) -> Self:
        for extension in extensions_in_use(self):
            changed, scratch = extension.architecture_settings(), self.model.from_scratch
            if changed and not scratch and not extension.changes_checkpoints:
                raise ValueError(
                    f"{extension.name}.{next(iter(changed))} makes another model, but model.path = "
                    f"{self.model.weights} names a checkpoint: leave one out"
                )
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
