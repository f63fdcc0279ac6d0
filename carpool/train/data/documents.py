"""From what the user names to a stream of documents: which files are meant, and the text in them.

| named                                    | one document is                                             |
|------------------------------------------|-------------------------------------------------------------|
| "stdlib"                                 | one module of this Python's standard library                |
| a text file (.txt, .md, .py, ... or any) | the file; a long one is cut at line ends, about every 64 KB |
| .jsonl, .ndjson, .json, also with .gz    | one line's `text_field`                                     |
| .parquet                                 | one row's `text_field`                                      |
| a folder saved by `Dataset.save_to_disk` | one row's `text_field`                                      |
| any other folder                         | those of its files whose ending is one of the above         |
| a glob (`logs/**/*.c`)                   | every file that matches, whatever its ending                |

Everything streams: memory holds one piece of one file. Order is fixed: as named, and sorted by path within a folder
or glob. Long text files are cut because held-out data is made of whole documents, and one file must not be one.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

STDLIB = "stdlib"
PIECE_BYTES = 64 * 1024

_JSON = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_JSON_IF_NAMED = (".json", ".json.gz")
_TEXT = (".txt", ".text", ".md", ".rst", ".py", ".txt.gz", ".text.gz")
# Not prose of Python: packages of others, test suites, and modules that are tables or generated text.
_STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data")
)


@dataclass(frozen=True)
class Source:
    """One file, or one dataset folder, and how it is read."""

    kind: Literal["text", "json", "parquet", "dataset"]
    path: Path

    def signature(self) -> list[tuple[str, int, int]]:
        """`(absolute path, bytes, mtime in ns)` of each file it consists of: changes when the data does."""
        files = [self.path] if self.kind != "dataset" else _files_below(self.path)
        return [(str(f.absolute()), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]


def find_sources(named: Sequence[str], key: str) -> list[Source]:
    """The files and dataset folders that `named` means, in reading order, each once.

    Args:
        named: Values of the configuration key: files, folders, globs, or "stdlib".
        key: That key, such as "data.train", for errors.

    Raises:
        ValueError: nothing there, or a folder in which nothing can be read.
    """
    found: dict[Source, None] = {}
    for entry in named:
        if entry == STDLIB:
            sources = _stdlib()
        else:
            path = Path(entry).expanduser()
            if path.is_dir():
                sources = _in_folder(path, key)
            elif path.exists():
                sources = [Source(_kind(path), path)]
            elif glob.has_magic(entry):
                matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
                if not matches:
                    raise ValueError(f"{key}: no file matches {entry} (seen from {Path.cwd()})")
                sources = [Source(_kind(match), match) for match in matches]
            else:
                raise ValueError(f"{key}: {entry} does not exist (seen from {Path.cwd()})")
        found.update(dict.fromkeys(sources))
    return list(found)


def describe_sources(named: Sequence[str]) -> str:
    """For people: what is read, on one line."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} standard library"
    return ", ".join(python if entry == STDLIB else entry for entry in named)


def read_documents(sources: Sequence[Source], text_field: str, splits: Sequence[str]) -> Iterator[str]:
    """The text of every document that is not blank.

    Args:
        sources: What to read, in order.
        text_field: Field of the text, in kinds that have fields.
        splits: Of a dataset folder with several splits, the first of these that it has is read.

    Raises:
        ValueError: a file that cannot be decoded, a line or row without the field; with path and position.
    """
    for source in sources:
        try:
            if source.kind == "text":
                documents = _read_text(source.path)
            elif source.kind == "json":
                documents = _read_json(source.path, text_field)
            elif source.kind == "parquet":
                documents = _read_parquet(source.path, text_field)
            else:
                documents = _read_dataset(source.path, text_field, splits)
            yield from (text for text in documents if text and not text.isspace())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{source.path} is no intact gzip file: {error}") from None
        except OSError as error:
            raise ValueError(f"{source.path} cannot be read: {error}") from None


def _kind(path: Path) -> Literal["text", "json", "parquet"]:
    name = path.name.lower()
    if name.endswith(_JSON + _JSON_IF_NAMED):
        return "json"
    return "parquet" if name.endswith(".parquet") else "text"


def _stdlib() -> list[Source]:
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        # Assigning to the slice prunes the walk: site-packages can be far larger than all the rest.
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ValueError(
            f"data.train: this Python has no standard library source in {root} (a stripped or zipped installation); "
            "name your own files with data.train"
        )
    return [Source("text", file) for file in sorted(files)]


def _in_folder(folder: Path, key: str) -> list[Source]:
    if (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    ):
        return [Source("dataset", folder)]
    files = _files_below(folder)
    usable = [file for file in files if file.name.lower().endswith((*_TEXT, *_JSON, ".parquet"))]
    if not usable:
        if not files:
            raise ValueError(f"{key}: the folder {folder} is empty")
        endings = sorted({file.suffix or file.name for file in files})
        raise ValueError(
            f"{key}: the folder {folder} has no text, JSON-lines or Parquet file, but {', '.join(endings[:8])}; if "
            f'these are text, name them with a glob, such as "{folder}/**/*{files[0].suffix}"'
        )
    return [Source(_kind(file), file) for file in usable]


def _files_below(folder: Path) -> list[Path]:
    """The files below `folder` in sorted order, without those that are hidden or in a hidden folder."""
    files: list[Path] = []
    # os.walk passes over a folder that vanishes while it looks, such as the half-written cache of another rank;
    # Path.rglob raises there.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [file for name in names if not name.startswith(".") and (file := Path(parent, name)).is_file()]
    return sorted(files)


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


def _read_text(path: Path) -> Iterator[str]:
    with _open(path) as file:
        offset = 0
        while raw := file.read(PIECE_BYTES):
            # To the end of the line, so that neither a line nor a character is cut.
            raw += file.readline()
            yield _decode(raw, path, offset).replace("\r\n", "\n")
            offset += len(raw)


def _read_json(path: Path, text_field: str) -> Iterator[str]:
    with _open(path) as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, offset)
            offset += len(raw)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                hint = "; a JSON array is not read: one object per line is needed" if line.lstrip()[0] == "[" else ""
                raise ValueError(f"{path}, line {number} is not JSON: {error}{hint}") from None
            where = f"{path}, line {number}"
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a JSON {type(row).__name__}; one object per line is needed")
            if text_field not in row:
                raise ValueError(f"{where} has no field {text_field!r}; {_name_fields(list(row))}")
            yield _text(row[text_field], text_field, where)


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"{path} has no column {text_field!r}; {_name_fields(names)}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    yield _text(value, text_field, f"{path}, row {row}")
                    row += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no readable Parquet file: {error}") from None


def _read_dataset(path: Path, text_field: str, splits: Sequence[str]) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{path} is a Hugging Face dataset folder, which needs the package datasets: pip install datasets"
        ) from None
    try:
        dataset: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a damaged folder makes it raise
        raise ValueError(f"{path} is no readable Hugging Face dataset folder: {error}") from None
    if isinstance(dataset, datasets.DatasetDict):
        split = next((name for name in splits if name in dataset), None)
        if split is None:
            raise ValueError(
                f"{path} has no split {' or '.join(splits)}, but {', '.join(dataset)}; name the folder of one split, "
                f"such as {path / next(iter(dataset), '')}"
            )
        dataset = dataset[split]
    if text_field not in dataset.column_names:
        raise ValueError(f"{path} has no column {text_field!r}; {_name_fields(dataset.column_names)}")
    row = 0
    for batch in dataset.select_columns([text_field]).iter(batch_size=256):
        for value in batch[text_field]:
            yield _text(value, text_field, f"{path}, row {row}")
            row += 1


def _text(value: Any, text_field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {text_field!r} holds {type(value).__name__}, not text")
    return value


def _name_fields(names: Sequence[str]) -> str:
    if not names:
        return "it has no fields at all"
    return f"it has {', '.join(map(str, names))}: set data.text_field to the one that holds the text"
