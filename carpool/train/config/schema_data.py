"""The section [data]: which text or conversations, and how they become sequences."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from carpool.train.config.declarations import Demo, Excludes, Needs
from carpool.train.config.schema_base import Section, Texts

EVALUATES = Needs("data.eval or data.eval_fraction>0", "held-out data: data.eval, or data.eval_fraction above 0")
_PROMPTS = Needs("data.format=prompt or none", "rows that are prompts (data.format)")
_CHATS = Needs("data.format!=text", "conversations or prompts (data.format)")


class DataSection(Section):
    """Which text or conversations, and how they become sequences."""

    train: Annotated[Texts, Demo()] = ("stdlib",)
    """Files, folders or globs: text, JSON-lines (.jsonl, .json, also .gz), Parquet, local Hugging Face dataset
    folders. "stdlib" is the source code of this machine's Python: real text, no download."""
    eval: Texts | None = None
    """Held-out data, given in the same way. none: eval_fraction of train."""
    eval_fraction: Annotated[float, Demo(0.05), Needs("data.eval=none or data.eval_fraction=0", "data.eval=none")] = (
        Field(default=0.05, ge=0, lt=1)
    )
    """Share of train's rows (documents, conversations) that is held out when eval is none."""
    eval_max_sequences: Annotated[int | None, Demo(170), EVALUATES] = Field(default=170, gt=0)
    """The most held-out sequences that are evaluated, evenly spread over the held-out data. none: all."""
    format: Literal["text", "messages", "prompt"] | None = None
    """What a row is: text, messages (a conversation), or prompt (a prompt and its completion). none: as the fields
    of the first row say."""
    tokenizer: str | None = None
    """"bytes" (built in), the path of a tokenizer.json, or a folder that holds one. none: the tokenizer in
    model.path if there is one, otherwise bytes."""
    eos_token: str | None = None
    """Token put after each document. none: the one that the tokenizer's files name."""
    text_field: Annotated[str, Needs("data.format=text or none", "rows that are plain text (data.format)")] = "text"
    """Field that holds the text in JSON-lines, Parquet and datasets."""
    messages_field: Annotated[
        str, Needs("data.format=messages or none", "rows that are conversations (data.format)")
    ] = "messages"
    """Field that holds the messages of a conversation; tools are in the field tools."""
    prompt_field: Annotated[str, _PROMPTS] = "prompt"
    """Field that holds a prompt: text, or messages."""
    completion_field: Annotated[str, _PROMPTS] = "completion"
    """Field that holds its completion, in the same way."""
    chat_template: Annotated[str | None, _CHATS] = None
    """A Jinja file that writes conversations. none: the tokenizer's own chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], _CHATS] = Field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking = false}."""
    loss: Literal["answers", "all"] = "answers"
    """What is learned of conversations and prompts: the assistant's answers and completions, or all tokens. Of plain
    text, all."""
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
            "data.packing!=stream and data.packing or data.format!=text",
            "examples that stay apart (data.packing=examples or off); documents that follow each other are cut anyway",
        ),
    ] = "refuse"
    """What becomes of an example that is longer than a sequence: an error before training, or its end is cut off, or
    its parts are examples."""
    sequence_length: Annotated[int, Demo()] = Field(default=96, ge=2)
    """Tokens in one sequence. Documents or examples are packed into these."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Read at most this many bytes of train's text, in whole documents. none: all."""
    cache_dir: str | None = None
    """Where tokens are kept between runs. none: $XDG_CACHE_HOME/carpool or ~/.cache/carpool."""

    @model_validator(mode="after")
    def _has_train(self) -> Self:
        if not self.train:
            raise ValueError('data.train is empty: name files, folders or globs, or "stdlib"')
        return self
