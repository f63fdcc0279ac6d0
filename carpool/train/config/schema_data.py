"""The section [data]: which text or conversations, and how they become sequences."""

from __future__ import annotations

from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from carpool.plugins.nearest import nearest
from carpool.plugins.redact import bare
from carpool.train.config.declarations import Demo, Excludes, Needs
from carpool.train.config.schema_base import NONE_WORDS, Section, Texts, registered

EVALUATES = Needs(
    "data.eval or data.eval_fraction>0 and data.eval or data.streaming=false",
    "held-out data: data.eval, or data.eval_fraction above 0",
)
_HOLDS_OUT = Needs(
    "data.eval=none or data.eval_fraction=0 and data.streaming=false or data.eval_fraction=0",
    "data.eval=none and data.streaming=false",
)
FORMAT = registered("data.format", "carpool.train.data.formats.FORMATS")
_PROMPTS = Needs("data.format=prompt or none", "rows that are prompts (data.format)")
# Which splits of a dataset folder are read, the first that is there.
TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "eval", "test")
_CHATS = Needs("data.format!=text or tokens", "conversations or prompts (data.format)")


class DataSource(Section):
    """One source of a mixture."""

    path: Texts
    """As data.train."""
    weight: float | None = Field(default=None, ge=0)
    """Its share of the sequences, over the sum of all weights."""
    epochs: float | None = Field(default=None, gt=0)
    """Instead of a weight: how often it is read in one epoch of the mixture."""
    name: str | None = None
    """In logs and reports. none: the name of its file or folder."""
    format: Annotated[str, FORMAT] | None = None
    """As data.format, of this source. none: data.format."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise ValueError(f'data.sources has {values!r}: write tables, such as {{path = "a.jsonl", weight = 0.7}}')
        for key in values:
            if key not in cls.model_fields:
                close = nearest(key, list(cls.model_fields))
                hint = f"did you mean {close}?" if close else f"it takes {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key {key} of a source in data.sources; {hint}")
        if not values.get("path"):
            raise ValueError("a source in data.sources has no path: name files, folders or globs")
        return {key: value for key, value in values.items() if value not in NONE_WORDS}


class DataSet(NamedTuple):
    """One source of a run, or one held-out set: its name, the setting that names it, what to read, and of a dataset
    folder with several splits, which, the first that is there."""

    name: str
    key: str
    data: DataSection
    splits: tuple[str, ...] = TRAIN_SPLITS

    def with_packing(self, packing: Literal["stream", "examples"]) -> DataSet:
        """The same, packed so."""
        return self._replace(data=self.data.model_copy(update={"packing": packing}))


class DataSection(Section):
    """Which text or conversations, and how they become sequences."""

    train: Annotated[Texts, Demo()] = ("stdlib",)
    """Files, folders or globs: text, JSON (.jsonl, .json, also .gz), CSV, Parquet, local Hugging Face dataset folders,
    token shards (Megatron's .idx with .bin, llm.c's .bin). "stdlib" is the source code of this machine's Python: real
    text, no download."""
    sources: Annotated[
        Annotated[
            tuple[DataSource, ...],
            BeforeValidator(lambda value: tuple(value) if type(value) in (list, tuple) else (value,)),
        ]
        | None,
        Excludes("data.train", "a mixture names its files itself, in data.sources"),
    ] = None
    """A mixture instead of train: a table for each source, with path (as train), weight (its share of the sequences)
    or epochs (how often it is read in an epoch of the mixture), name and format."""
    allow_download: bool = False
    """Read addresses (s3://, hf://, https://, whatever fsspec reads) and data sets of the Hugging Face Hub (OWNER/NAME,
    OWNER/NAME@REVISION, OWNER/NAME:CONFIG) that train, sources or eval name. Messages and records leave out the
    credentials of addresses (https://USER:PASSWORD@..., ?token=...), which stores also read from the environment."""
    eval: Texts | dict[str, Texts] | None = None
    """Held-out data, given as train is, or several sets by name, each evaluated by itself. none: eval_fraction of
    train."""
    eval_fraction: Annotated[float, Demo(0.05), _HOLDS_OUT] = Field(default=0.05, ge=0, lt=1)
    """Share of train's rows (documents, conversations) that is held out when eval is none."""
    streaming: Annotated[
        bool,
        Excludes("training.num_train_epochs", "how long an epoch of a stream is is not known; set training.max_steps"),
    ] = False
    """Read, tokenize and pack the training data while the run goes on, and keep nothing of it on disk: for data that
    is larger than the disk. Its end is not known, so that training.max_steps is needed; held-out data comes from eval
    alone. Sequences of one example each are not grouped by length."""
    stream_lanes: Annotated[int, Needs("data.streaming")] = Field(default=8, gt=0)
    """Reading is divided into this many lanes, or the largest divisor of a step's sequences below. Each rank reads
    those that its sequences are of; a multiple of the number of ranks divides all the work."""
    stream_buffer: Annotated[int, Needs("data.streaming")] = Field(default=64, gt=0)
    """Sequences of a source that a lane reads at once, and shuffles."""
    eval_max_sequences: Annotated[int | None, Demo(170), EVALUATES] = Field(default=170, gt=0)
    """The most held-out sequences that are evaluated, evenly spread over the held-out data. none: all."""
    format: Annotated[str, FORMAT] | None = None
    """What a row is: text, messages or sharegpt (a conversation), prompt (a prompt and its completion), alpaca (a
    question and its answer), tokens, or a plug-in's. none: as the fields of the first row say."""
    tokenizer: str | None = None
    """"bytes" (built in), the path of a tokenizer.json, or a folder that holds one. none: the tokenizer in
    model.path if there is one, otherwise bytes."""
    eos_token: str | None = None
    """Token put after each document. none: the one that the tokenizer's files name."""
    text_field: Annotated[str, Needs("data.format=text or none", "rows that are plain text (data.format)")] = "text"
    """Field that holds the text in JSON-lines, Parquet and datasets."""
    messages_field: Annotated[
        str, Needs("data.format=messages or sharegpt or none", "rows that are conversations (data.format)")
    ] = "messages"
    """Field that holds the messages of a conversation (of sharegpt, by default conversations); tools are in the field
    tools."""
    prompt_field: Annotated[str, _PROMPTS] = "prompt"
    """Field that holds a prompt: text, or messages."""
    completion_field: Annotated[str, _PROMPTS] = "completion"
    """Field that holds its completion, in the same way."""
    chat_template: Annotated[str | None, _CHATS] = None
    """A Jinja file that writes conversations. none: the tokenizer's own chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], _CHATS] = Field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking = false}."""
    loss: Literal["answers", "last", "all"] = "answers"
    """What is learned of conversations and prompts: the assistant's answers and completions, the last of them, or all
    tokens. Of plain text, all. A message with "train" (true, false) or "weight" (1, 0) says it itself."""
    roles_to_train: Annotated[Texts, _CHATS, Excludes("data.loss=all", "all messages are learned")] = ("assistant",)
    """Roles whose messages are learned."""
    turns: Annotated[
        Literal["together", "apart"],
        _CHATS,
        Excludes(
            "data.loss=all", "an example of each answer would learn the conversation before it again with each answer"
        ),
    ] = "together"
    """A conversation is one example, or each of its answers is one, with the conversation before it: for chat
    templates that leave out earlier thinking."""
    packing: Literal["stream", "examples", "off"] | None = None
    """stream: documents end to end, cut into sequences. examples: whole examples in a sequence, none sees another.
    off: one example in a sequence. none: stream for text, otherwise examples."""
    pad_to: Annotated[Literal["longest", "sequence_length"], Needs("data.packing=off")] = "longest"
    """Of packing=off, how long batches are: as their longest sequence, or all alike for CUDA graphs."""
    group_by_length: Annotated[bool, Needs("data.packing=off")] = True
    """Of packing=off: steps have sequences of similar length, in random order."""
    too_long: Annotated[
        Literal["refuse", "truncate", "split"],
        Needs(
            "data.packing!=stream and data.packing or data.format!=text or tokens",
            "examples that stay apart (data.packing=examples or off); documents that follow each other are cut anyway",
        ),
    ] = "refuse"
    """What becomes of an example that is longer than a sequence: an error before training, or its end is cut off, or
    its parts are examples."""
    sequence_length: Annotated[int, Demo()] = Field(default=96, ge=2)
    """Tokens in one sequence. Documents or examples are packed into these."""
    max_bytes: Annotated[int | None, Needs("data.streaming=false")] = Field(default=None, gt=0)
    """Read at most this many bytes of train's text, in whole documents. none: all."""
    cache_dir: str | None = None
    """Where tokens are kept between runs. none: $XDG_CACHE_HOME/carpool or ~/.cache/carpool."""

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if not self.train:
            raise ValueError('data.train is empty: name files, folders or globs, or "stdlib"')
        held = self.eval.values() if isinstance(self.eval, dict) else [self.eval]
        if self.eval is not None and not (held and all(held)):
            raise ValueError("data.eval is empty: name files, folders or globs, or leave it out")
        if self.sources is not None:
            _check_mixture(self.sources, self.streaming)
        return self

    def train_sets(self) -> list[DataSet]:
        """What is trained on: each source of a mixture, or `train`."""
        alone: dict[str, Any] = {"sources": None}
        if self.eval is not None or self.streaming:
            alone |= {"eval": None, "eval_fraction": 0.0}
        if self.sources is None:
            return [DataSet("train", "data.train", self.model_copy(update=alone))]
        return [
            DataSet(
                source_name(source),
                f"data.sources ({source_name(source)})",
                self.model_copy(update={**alone, "train": source.path, "format": source.format or self.format}),
            )
            for source in self.sources
        ]

    def eval_sets(self) -> list[DataSet]:
        """What `eval` names: several sets by name, or one of the name "eval"."""
        named = {} if self.eval is None else self.eval if isinstance(self.eval, dict) else {"eval": self.eval}
        alone = {"sources": None, "eval": None, "eval_fraction": 0.0, "max_bytes": None}
        return [
            DataSet(
                name,
                f"data.eval.{name}" if isinstance(self.eval, dict) else "data.eval",
                self.model_copy(update={**alone, "train": paths}),
                EVAL_SPLITS,
            )
            for name, paths in named.items()
        ]


def source_name(source: DataSource) -> str:
    """Of a source, in logs and reports: without an ending, and of a glob, the folder before it."""
    path = bare(source.path[0])
    parts = [part for part in Path(path).parts if not has_magic(part)]
    return source.name or (parts[-1].split(".")[0] if parts else path)


def _check_mixture(sources: tuple[DataSource, ...], streaming: bool) -> None:
    names = [source_name(source) for source in sources]
    if not sources:
        raise ValueError("data.sources is empty: give at least one source, or leave it out")
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"data.sources has two sources of the name {double!r}: give them names")
    for key, other in (("weight", "epochs"), ("epochs", "weight")):
        having = [name for name, one in zip(names, sources, strict=True) if getattr(one, key) is not None]
        if having and (without := [name for name in names if name not in having]):
            raise ValueError(
                f"data.sources: {having[0]} has {key}, {without[0]} has none: give all {key}, or all {other}"
            )
        if having and all(getattr(one, other) is not None for one in sources):
            raise ValueError("data.sources has weight and epochs: give one of them")
    if streaming and len(sources) > 1 and any(source.weight is None for source in sources):
        raise ValueError("data.sources with data.streaming needs weights, because how long a source is is not known")
    if all(source.weight == 0 for source in sources):
        raise ValueError("data.sources: every weight is 0, so nothing would be learned: give one source a weight")
