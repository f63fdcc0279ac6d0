"""Which files are meant by what the user names.

| named                                    | one row is                                                  |
|------------------------------------------|-------------------------------------------------------------|
| "stdlib"                                 | one module of this Python's standard library                |
| a text file (.txt, .py, any but .csv)    | the file; a long one is cut at line ends, about every 64 KB |
| .jsonl, .ndjson, .json, also with .gz    | one line                                                    |
| .parquet                                 | one row                                                     |
| a folder saved by `Dataset.save_to_disk` | one row                                                     |
| any other folder                         | those of its files whose ending is one of the above         |
| a glob (`logs/**/*.c`)                   | every file that matches, whatever its ending                |

Order is fixed: as named, and sorted by path within a folder or glob. `carpool.train.data.rows` reads them.
"""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carpool.train.config.published import download_hint

STDLIB = "stdlib"

_JSON = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_JSON_IF_NAMED = (".json", ".json.gz")
_TEXT = (".txt", ".text", ".md", ".rst", ".py", ".txt.gz", ".text.gz")
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
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
        ValueError: nothing there, a folder in which nothing can be read, or a table of a kind that is not read.
    """
    found: dict[Source, None] = {}
    for entry in named:
        if not entry.strip():
            raise ValueError(f'{key} has a name that is empty: name a file, a folder, a glob, or "stdlib"')
        if entry == STDLIB:
            sources = _stdlib()
        else:
            path = Path(entry).expanduser()
            if path.is_dir():
                sources = _in_folder(path, key)
            elif path.is_file():
                _check_ending(path, key)
                sources = [Source(_kind(path), path)]
            elif path.exists():
                # Data is read by the agent and by ranks, from the start each time.
                raise ValueError(f"{key}: {entry} is no file, but a pipe or a device; write what it holds to a file")
            elif glob.has_magic(entry):
                matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
                if not matches:
                    raise ValueError(f"{key}: no file matches {entry} (seen from {Path.cwd()})")
                for match in matches:
                    _check_ending(match, key)
                sources = [Source(_kind(match), match) for match in matches]
            else:
                hint = download_hint(entry, " --repo-type dataset")
                raise ValueError(f"{key}: {entry} does not exist (seen from {Path.cwd()}){hint}")
        found.update(dict.fromkeys(sources))
    return list(found)


def describe_sources(named: Sequence[str]) -> str:
    """For people: what is read, on one line."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} standard library"
    return ", ".join(python if entry == STDLIB else entry for entry in named)


def _check_ending(path: Path, key: str) -> None:
    """Refuse a table that would be learned as a text."""
    if path.name.lower().endswith(_TABLES):
        raise ValueError(
            f"{key}: {path} is a table of a kind that is not read; write it as JSON lines or Parquet, such as with "
            f"datasets.load_dataset('csv', data_files='{path}')['train'].to_json('data.jsonl')"
        )


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
        _check_ending(files[0], key)
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
