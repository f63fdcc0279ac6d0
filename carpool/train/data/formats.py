"""What rows of data are: the registry of formats. The next format is one class, in one file:

    class Questions(Format):
        name, row = "questions", "question"

        def fields(self, data):
            return Fields(("question", "answer"), (), "the fields question and answer")

        def encoder(self, data, tokenizer, model_path):
            return Conversations(data, load_pretrained(data, model_path), self.messages, ["question"])

        def messages(self, row):
            return [{"role": "user", "content": row.fields["question"]}, ...]

    FORMATS.register(Questions)         or an entry point in the group "carpool.data_formats"

| format     | fields                           | a row                                                              |
|------------|----------------------------------|--------------------------------------------------------------------|
| `text`     | `text`                           | a document                                                         |
| `messages` | `messages`, `tools`              | a conversation: `[{"role": "user", "content": ...}, ...]`          |
| `prompt`   | `prompt`, `completion`, `tools`  | two texts, which follow each other as they are; or two lists of    |
|            |                                  | messages, which make a conversation                                |
| `sharegpt` | `conversations`, `system`,       | a conversation: `[{"from": "human", "value": ...}, ...]`           |
|            | `tools`                          |                                                                    |
| `alpaca`   | `instruction`, `output`,         | a question and its answer, after those of `history`                |
|            | `input`, `system`, `history`     |                                                                    |
| `tokens`   | `input_ids`, `labels`            | tokens, as they are                                                |

The format of a file is that whose required fields its first row has.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.plugins import Registry
from carpool.train.config.schema import DataSection
from carpool.train.config.schema_data import TRAIN_SPLITS
from carpool.train.data.alpaca import Alpaca
from carpool.train.data.examples import Format, MessagesFormat, PromptFormat, TextFormat
from carpool.train.data.pretokenised import TokensFormat
from carpool.train.data.readers import Source, field_names
from carpool.train.data.rows import Fields
from carpool.train.data.sharegpt import ShareGPT
from carpool.train.data.sources import sources_of

_BUILT_IN = (TextFormat, MessagesFormat, PromptFormat, ShareGPT, Alpaca, TokensFormat)
FORMATS: Registry[type[Format]] = Registry(
    "format of data", "carpool.data_formats", {form.name: form for form in _BUILT_IN}
)


def fields_of(data: DataSection, form: str) -> Fields:
    """What is read of the rows of a format."""
    return FORMATS[form]().fields(data)


def find_format(data: DataSection, sources: Sequence[Source], splits: Sequence[str] = TRAIN_SPLITS) -> str:
    """The format of these sources: as `data.format` says, otherwise as the first row's fields say.

    Raises:
        ValueError: fields of several formats; or the first file cannot be read.
    """
    if data.format is not None:
        return data.format
    names = field_names(sources[0], splits)
    found = [form for form in FORMATS if set(fields_of(data, form).required) <= set(names)]
    if len(found) > 1:
        raise ValueError(
            f"{sources[0].path} has fields of several formats ({', '.join(found)}): set data.format to the one that is "
            "meant"
        )
    return found[0] if found else TextFormat.name


def are_packed(data: DataSection) -> bool:
    """Whether sequences will hold examples that do not see each other, as far as the settings and the first file of
    each source tell. False where there is no such file."""
    if data.packing is not None:
        return data.packing == "examples"
    try:
        return not all(FORMATS[form].streams for form in source_formats(data))
    except (ValueError, OSError):
        return False


def source_formats(data: DataSection) -> list[str]:
    """The format of each source of the training data. ValueError: as `find_format`."""
    return [find_format(one.data, [] if one.data.format is not None else sources_of(one)) for one in data.train_sets()]
