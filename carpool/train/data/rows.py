"""Rows of files: a piece of text, a line of JSON, or a row of a table, with where it stands.

Everything streams: memory holds one piece of one file. Long text files are cut because held-out data is made of whole
documents, and one file must not be one. Lines of JSON are read here, so that an error names the line; tables (Parquet
and saved datasets) are read by the library `datasets`.

What a row of data is: plain text, a conversation, or a prompt with its completion.

| format     | fields                    | a row                                                                     |
|------------|---------------------------|---------------------------------------------------------------------------|
| `text`     | `text`                    | a document                                                                |
| `messages` | `messages`, `tools`       | a conversation: `[{"role": "user", "content": ...}, ...]`, and tools      |
| `prompt`   | `prompt`, `completion`,   | two texts, which follow each other as they are; or two lists of messages, |
|            | `tools`                   | which make a conversation                                                 |
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from carpool.train.config.schema import DataSection
from carpool.train.data.sources import Source, find_sources

PIECE_BYTES = 64 * 1024
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """Its fields, and where it stands, for errors."""

    fields: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Fields:
    """What is wanted of each row: fields that it must have, others that count if it has them, and the settings that say
    which fields those are. `text`: the field that stands for the text of a text file; None: such files have no place
    here."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    settings: str
    text: str | None


def read_rows(sources: Sequence[Source], wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
    """Every row.

    Args:
        sources: What to read, in order.
        wanted: Of tables, other columns are not read.
        splits: Of a dataset folder with several splits, the first of these that it has is read.

    Raises:
        ValueError: a file that cannot be decoded, a row without a field; with path and position.
    """
    for source in sources:
        try:
            if source.kind == "text":
                yield from _read_text(source.path, wanted)
            elif source.kind == "json":
                yield from _read_json(source.path, wanted)
            else:
                yield from _read_table(source, wanted, splits)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{source.path} is no intact gzip file: {error}") from None
        except OSError as error:
            raise ValueError(f"{source.path} cannot be read: {error}") from None


def field_names(source: Source, splits: Sequence[str]) -> list[str]:
    """The fields of its first row; none if it has no rows, or is a text file.

    Raises:
        ValueError: as `read_rows`.
    """
    if source.kind == "text":
        return []
    if source.kind != "json":
        return list(_open_table(source, splits).column_names or ())
    first = next(read_rows([source], Fields((), (), "", None), splits), None)
    return [] if first is None else list(first.fields)


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {offset + error.start} "
            f"({error.reason}); convert the file, or leave it out"
        ) from None


def _read_text(path: Path, wanted: Fields) -> Iterator[Row]:
    if wanted.text is None:
        raise ValueError(
            f"{path} is a text file, which has no field {' or '.join(wanted.required)}: these are read from JSON-lines "
            "(.jsonl), Parquet and saved datasets"
        )
    with _open(path) as file:
        offset = 0
        while raw := file.read(PIECE_BYTES):
            # To the end of the line, so that neither a line nor a character is cut.
            raw += file.readline()
            yield Row({wanted.text: _decode(raw, path, offset).replace("\r\n", "\n")}, f"{path}, from byte {offset}")
            offset += len(raw)


def _read_json(path: Path, wanted: Fields) -> Iterator[Row]:
    with _open(path) as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, offset)
            offset += len(raw)
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            fields = parse_json(line, where)
            if not isinstance(fields, dict):
                raise ValueError(f"{where} is a JSON {type(fields).__name__}; one object per line is needed")
            for name in wanted.required:
                if name not in fields:
                    raise ValueError(f"{where} has no field {name!r}; {_name_fields(list(fields), wanted)}")
            yield Row(fields, where)


def parse_json(text: str, where: str) -> Any:
    """What a text of JSON says.

    Raises:
        ValueError: it is none, nested too deeply, or has half a character; `where` says which text."""
    text = text.strip()
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        hint = ""
        if text.startswith("["):
            hint = "; a JSON array is not read: one object per line is needed"
        elif error.pos >= len(text) or error.msg.startswith("Unterminated"):
            hint = f"; it ends in the middle, with {text[-16:]!r}: it was cut off, or goes over several lines"
        raise ValueError(f"{where} is not JSON: {error.msg} in column {error.colno}{hint}") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} has {half!a}, half of a surrogate pair: write the whole, or leave it out") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read: make it flatter, or leave it out") from None


def _open_table(source: Source, splits: Sequence[str]) -> Any:
    """A dataset, whose rows have yet to be read."""
    path = source.path
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path} is read by the package datasets, which is missing: pip install datasets") from None
    try:
        if source.kind == "parquet":
            return datasets.load_dataset("parquet", data_files=[str(path)], split="train", streaming=True)
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a damaged file makes it raise
        raise ValueError(f"{path} is no readable {_KINDS[source.kind]}: {error}") from None
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    split = next((name for name in splits if name in dataset), None)
    if split is None:
        raise ValueError(
            f"{path} has no split {' or '.join(splits)}, but {', '.join(dataset)}; name the folder of one split, "
            f"such as {path / next(iter(dataset), '')}"
        )
    return dataset[split]


_KINDS = {"parquet": "Parquet file", "dataset": "Hugging Face dataset folder"}


def _read_table(source: Source, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
    dataset = _open_table(source, splits)
    names = list(dataset.column_names or ())
    for name in wanted.required:
        if name not in names:
            raise ValueError(f"{source.path} has no column {name!r}; {_name_fields(names, wanted)}")
    columns = [name for name in (*wanted.required, *wanted.optional) if name in names]
    batches, number = dataset.select_columns(columns).iter(batch_size=256), 0
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # of a file that is damaged further on
            raise ValueError(f"{source.path} is no readable {_KINDS[source.kind]}: {error}") from None
        if batch is None:
            return
        for values in zip(*(batch[name] for name in columns), strict=True):
            fields = {name: _without_nulls(value) for name, value in zip(columns, values, strict=True)}
            yield Row(fields, f"{source.path}, row {number}")
            number += 1


def _without_nulls(value: Any) -> Any:
    """Tables give every object the keys of all others, and null where it has none of its own."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _name_fields(names: Sequence[str], wanted: Fields) -> str:
    if not names:
        return "it has no fields at all"
    return f"it has {', '.join(map(str, names))}: set {wanted.settings}"


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
