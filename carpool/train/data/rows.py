"""Rows of files: a piece of text, a line of JSON, or a row of a table, with where it stands.

Everything streams: memory holds one piece of one file (of a JSON array, the file). A `Reader` reads one kind of file;
`carpool.train.data.readers` has the registry of them, `carpool.train.data.formats` says what rows mean.

Text. Long files are cut because held-out data is made of whole documents, and one file must not be one.

JSON. Lines, or the objects of one array in a .json file. They are read here, so that an error names the line.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec

from carpool.plugins.redact import bare, redact

PIECE_BYTES = 64 * 1024
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Url(str):
    """The address of a file on a store that fsspec reads, such as s3://bucket/a.parquet. As text it has no
    credentials."""

    @property
    def name(self) -> str:
        """After the last slash, as of a path."""
        return bare(self).rsplit("/", 1)[-1]

    @property
    def address(self) -> str:
        """For stores: with credentials."""
        return self[:]

    def __str__(self) -> str:
        return redact(self)

    def __format__(self, spec: str) -> str:
        return format(redact(self), spec)


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
    text: str | None = None

    def check(self, names: Sequence[str], where: str, what: str = "field") -> None:
        """Raise ValueError if a row with these fields lacks one. `what`: what its file calls a field."""
        for name in self.required:
            if name not in names:
                has = (
                    f"it has {', '.join(map(str, names))}: set {self.settings}" if names else "it has no fields at all"
                )
                raise ValueError(f"{where} has no {what} {name!r}; {has}")


class Reader:
    """Reads one kind of file.

    Attributes:
        name: in the registry.
        what: one such file, for people.
        endings: of files of this kind, below a folder too.
        if_named: further endings of files that are named themselves, or by a glob.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    if_named: ClassVar[tuple[str, ...]] = ()

    def files(self, path: Path) -> list[Path]:
        """The local files that `path` consists of."""
        return [path]

    def names(self, path: Path | Url, splits: Sequence[str]) -> list[str]:
        """The fields of the first row; none if there is no row, or the kind has no fields."""
        first = next(self.rows(path, Fields((), (), ""), splits), None)
        return [] if first is None else list(first.fields)

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        """Every row, as `carpool.train.data.readers.read_rows`."""
        raise NotImplementedError


def open_file(path: Path | Url) -> BinaryIO:
    """Its bytes, unpacked if its ending says that they are packed."""
    # A local name may hold what an address means something by, such as "::".
    file = fsspec.open(path.address, "rb").open() if isinstance(path, Url) else open(path, "rb")  # noqa: SIM115
    return gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file  # type: ignore[return-value]


class TextFile(Reader):
    name, what = "text", "text file"
    endings = (".txt", ".text", ".md", ".rst", ".py", ".txt.gz", ".text.gz")

    def names(self, path: Path | Url, splits: Sequence[str]) -> list[str]:
        return []

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        if wanted.text is None:
            raise ValueError(
                f"{path} is a text file, which has no field {' or '.join(wanted.required)}: these are read from "
                "JSON (.jsonl, .json), CSV, Parquet and saved datasets"
            )
        with open_file(path) as file:
            offset = 0
            while raw := file.read(PIECE_BYTES):
                # To the end of the line, so that neither a line nor a character is cut.
                raw += file.readline()
                yield Row({wanted.text: decode(raw, path, offset).replace("\r\n", "\n")}, f"{path}, from byte {offset}")
                offset += len(raw)


class JsonFile(Reader):
    name, what = "json", "JSON file"
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    if_named = (".json", ".json.gz")

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        for where, fields in _objects(path, path.name.lower().endswith(self.if_named)):
            if not isinstance(fields, dict):
                raise ValueError(f"{where} is a JSON {type(fields).__name__}; one object per line is needed")
            wanted.check(list(fields), where)
            yield Row(fields, where)


def _objects(path: Path | Url, may_be_array: bool) -> Iterator[tuple[str, Any]]:
    """(where, what) of each line, or of each item of one array."""
    with open_file(path) as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            line = decode(raw, path, offset)
            if may_be_array and line.lstrip().startswith("["):
                items = parse_json(line + decode(file.read(), path, offset + len(raw)), str(path), number)
                yield from ((f"{path}, item {number}", item) for number, item in enumerate(items, start=1))
                return
            offset += len(raw)
            if line.strip():
                may_be_array = False
                yield (where := f"{path}, line {number}"), parse_json(line, where)


def decode(raw: bytes, path: Path | Url, offset: int) -> str:
    """Text of these bytes of a file, from `offset` on. ValueError: they are none."""
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {offset + error.start} "
            f"({error.reason}); convert the file, or leave it out"
        ) from None


def parse_json(text: str, where: str, array_line: int = 0) -> Any:
    """What a text of JSON says. `array_line`: of a file's array, the line that it begins in.

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
        if array_line:
            where += f", line {array_line + error.lineno - 1},"
        elif text.startswith("["):
            hint = "; a JSON array is read from a .json file: rename it, or write one object per line"
        elif error.pos >= len(text) or error.msg.startswith("Unterminated"):
            hint = f"; it ends in the middle, with {text[-16:]!r}: it was cut off, or goes over several lines"
        raise ValueError(f"{where} is not JSON: {error.msg} in column {error.colno}{hint}") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} has {half!a}, half of a surrogate pair: write the whole, or leave it out") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read: make it flatter, or leave it out") from None
