"""What a row of data is: plain text, a conversation, or a prompt with its completion.

| format     | fields                    | a row                                                                     |
|------------|---------------------------|---------------------------------------------------------------------------|
| `text`     | `text`                    | a document                                                                |
| `messages` | `messages`, `tools`       | a conversation: `[{"role": "user", "content": ...}, ...]`, and tools      |
| `prompt`   | `prompt`, `completion`,   | two texts, which follow each other as they are; or two lists of messages, |
|            | `tools`                   | which make a conversation                                                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from carpool.train.config.schema import DataSection
from carpool.train.data.rows import Fields, field_names
from carpool.train.data.sources import Source, find_sources

Format = Literal["text", "messages", "prompt"]

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("validation", "eval", "test")
TOOLS = "tools"


def fields_of(data: DataSection, form: Format) -> Fields:
    """What is read of the rows of a format."""
    if form == "text":
        settings = (
            "data.text_field to the one that holds the text (of conversations: data.messages_field; of questions "
        )
        settings += "with answers: data.prompt_field and data.completion_field)"
        return Fields((data.text_field,), (), settings, data.text_field)
    if form == "messages":
        settings = "data.messages_field to the one that holds the messages"
        return Fields((data.messages_field,), (TOOLS,), settings, None)
    settings = "data.prompt_field and data.completion_field to those that hold them"
    return Fields((data.prompt_field, data.completion_field), (TOOLS,), settings, None)


def find_format(data: DataSection, sources: Sequence[Source]) -> Format:
    """The format of the training data: as `data.format` says, otherwise as the first row's fields say.

    Raises:
        ValueError: fields of several formats; or the first file cannot be read.
    """
    if data.format is not None:
        return data.format
    names = field_names(sources[0], TRAIN_SPLITS)
    forms: tuple[Format, ...] = ("text", "messages", "prompt")
    found = [form for form in forms if set(fields_of(data, form).required) <= set(names)]
    if len(found) > 1:
        raise ValueError(
            f"{sources[0].path} has fields of several formats ({', '.join(found)}): set data.format to the one that is "
            "meant"
        )
    return found[0] if found else "text"


def are_packed(data: DataSection) -> bool:
    """Whether sequences will hold examples that do not see each other, as far as the settings and the first file tell.
    False where there is no such file."""
    if data.packing is not None:
        return data.packing == "examples"
    try:
        return find_format(data, [] if data.format is not None else find_sources(data.train, "data.train")) != "text"
    except (ValueError, OSError):
        return False
