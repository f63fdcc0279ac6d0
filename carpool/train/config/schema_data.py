"""The section [data]: which text or conversations, and how they become sequences."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carpool.train.config.schema_base import Section, Texts


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
    pad_to: Literal["longest", "sequence_length"] = Field(
        default="longest",
        description="Of packing=off, how long batches are: as their longest sequence, or all alike for CUDA graphs.",
    )
    group_by_length: bool = Field(
        default=True, description="Of packing=off: steps have sequences of similar length, in random order."
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
