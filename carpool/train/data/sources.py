"""Which files are meant by what the user names.

| named                                    | one row is                                                  |
|------------------------------------------|-------------------------------------------------------------|
| "stdlib"                                 | one module of this Python's standard library                |
| a text file (.txt, .py, any not below)   | the file; a long one is cut at line ends, about every 64 KB |
| .jsonl, .ndjson, .json, also with .gz    | one line; of a .json file that holds an array, one item     |
| .parquet, .csv, .tsv                     | one row                                                     |
| .idx (Megatron), .bin (shards of tokens) | one document of tokens; 65,536 tokens                       |
| a folder saved by `Dataset.save_to_disk` | one row                                                     |
| any other folder                         | those of its files whose ending is one of the above         |
| a glob (`logs/**/*.c`)                   | every file that matches, whatever its ending                |
| s3://bucket/*.parquet, https://..., with | as of a file here, read from there: what fsspec reads       |
| `data.allow_download`; OWNER/NAME        | the files of a data set of the Hugging Face Hub             |

Order is fixed: as named, and sorted by path within a folder or glob. `carpool.train.data.readers` reads them.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import fsspec

from carpool.plugins.redact import REDACTED, bare, redact
from carpool.train.config.published import download_hint
from carpool.train.config.schema_data import DataSet
from carpool.train.data.readers import READERS, Source, reader_name
from carpool.train.data.rows import TextFile, Url
from carpool.train.data.tables import SavedDataset

STDLIB = "stdlib"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:[\w.-]+)?")

# Not prose of Python: packages of others, test suites, and modules that are tables or generated text.
_STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data")
)


def sources_of(one: DataSet) -> list[Source]:
    """As `find_sources`, of one source of a run, or one held-out set."""
    return find_sources(one.data.train, one.key, one.splits if one.data.allow_download else None)


def find_sources(named: Sequence[str], key: str, remote: Sequence[str] | None = None) -> list[Source]:
    """The files and dataset folders that `named` means, in reading order, each once.

    Args:
        named: Values of the configuration key: files, folders, globs, or "stdlib".
        key: That key, such as "data.train", for errors.
        remote: Addresses and names of the Hub count, too; of a data set there, the first of these splits that it has.

    Raises:
        ValueError: nothing there, a folder in which nothing can be read, or a file of a kind that is not read.
    """
    found: dict[Source, None] = {}
    for entry in named:
        if not entry.strip():
            raise ValueError(f'{key} has a name that is empty: name a file, a folder, a glob, or "stdlib"')
        if entry == STDLIB:
            sources = _stdlib(sysconfig.get_paths()["stdlib"])
        elif remote is not None and "://" in entry:
            sources = _on_store(entry, key)
        else:
            path = Path(entry).expanduser()
            if path.is_dir():
                sources = _in_folder(path, key)
            elif path.is_file():
                sources = [_named(path, key)]
            elif path.exists():
                # Data is read by the agent and by ranks, from the start each time.
                raise ValueError(f"{key}: {entry} is no file, but a pipe or a device; write what it holds to a file")
            elif glob.has_magic(entry) and "://" not in entry:
                matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
                if not matches:
                    raise ValueError(f"{key}: no file matches {entry} (seen from {Path.cwd()})")
                sources = [_named(match, key) for match in matches]
            elif (index := Path(f"{path}.idx")).is_file():  # as Megatron's options name a pair of files
                sources = [_named(index, key)]
            elif remote is not None and _HUB_NAME.fullmatch(entry):
                sources = [_at(file, key) for file in _on_hub(entry, tuple(remote), key)]
            else:
                if hint := download_hint(entry, " --repo-type dataset"):
                    hint += ", or set data.allow_download=true"
                raise ValueError(f"{key}: {redact(entry)} does not exist (seen from {Path.cwd()}){hint}")
        found.update(dict.fromkeys(sources))
    return list(found)


def describe_sources(named: Sequence[str]) -> str:
    """For people: what is read, on one line."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} standard library"
    return redact(", ".join(python if entry == STDLIB else entry for entry in named))


def _named(path: Path, key: str) -> Source:
    """A file that was named itself, or by a glob. What has no ending that is known is text, unless it is binary."""
    kind = reader_name(path)
    if kind is None:
        with path.open("rb") as file:
            if b"\0" in file.read(1024):
                raise ValueError(f"{key}: {path} is a binary file of a kind that is not read ({_endings()})")
    return Source(kind or TextFile.name, path)


def _endings() -> str:
    """For errors: which files are read."""
    return ", ".join(ending for kind in READERS for ending in (*READERS[kind].endings, *READERS[kind].if_named))


def _at(address: str, key: str) -> Source:
    """A file on a store, or, where it has no protocol, on this machine."""
    if "://" not in address:
        return _named(Path(address), key)
    kind = reader_name(Url(address))
    if kind is None:
        raise ValueError(f"{key}: {Url(address)} is a file of a kind that is not read ({_endings()})")
    return Source(kind, Url(address))


def _on_store(entry: str, key: str) -> list[Source]:
    if REDACTED in entry:
        raise ValueError(
            f"{key}: {entry} comes from a record, which has no credentials: give the address again, or the credentials "
            "as its store's own environment variables or files"
        )
    try:
        files, place = fsspec.core.url_to_fs(entry)
        if glob.has_magic(bare(entry)):
            found = sorted(files.glob(place))
        else:
            found = sorted(files.find(place)) if files.isdir(place) else [place] if files.exists(place) else []
    except Exception as error:  # of any store, and its package may be missing
        raise ValueError(redact(f"{key}: {entry} cannot be read: {error}", entry)) from None
    if not found:
        raise ValueError(f"{key}: there is no file at {Url(entry)}")
    return [_at(files.unstrip_protocol(one), key) for one in found]


@lru_cache
def _on_hub(entry: str, splits: tuple[str, ...], key: str) -> list[str]:
    """The files of a data set of the Hugging Face Hub, as `datasets` finds them: NAME, NAME@REVISION, NAME:CONFIG."""
    import datasets

    name, _, config = entry.partition(":")
    name, _, revision = name.partition("@")
    try:
        files = datasets.load_dataset_builder(name, config or None, revision=revision or None).config.data_files or {}
    except Exception as error:  # of the network, or of the data set
        raise ValueError(f"{key}: {entry} cannot be read from the Hugging Face Hub: {error}") from None
    split = next((one for one in splits if one in files), None)
    if split is None:
        raise ValueError(f"{key}: {entry} has no split {' or '.join(splits)}, but {', '.join(files) or 'no files'}")
    return [str(file) for file in files[split]]


@lru_cache(maxsize=1)
def _stdlib(root: str) -> list[Source]:
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
    return [Source(TextFile.name, file) for file in sorted(files)]


def _in_folder(folder: Path, key: str) -> list[Source]:
    if (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    ):
        return [Source(SavedDataset.name, folder)]
    files = _files_below(folder)
    usable = [Source(kind, file) for file in files if (kind := reader_name(file, in_folder=True)) is not None]
    if not usable:
        if not files:
            raise ValueError(f"{key}: the folder {folder} is empty")
        endings = sorted({file.suffix or file.name for file in files})
        raise ValueError(
            f"{key}: the folder {folder} has no text, JSON-lines, CSV or Parquet file, but {', '.join(endings[:8])}; "
            f'if these are text, name them with a glob, such as "{folder}/**/*{files[0].suffix}"'
        )
    return usable


def _files_below(folder: Path) -> list[Path]:
    """The files below `folder` in sorted order, without those that are hidden or in a hidden folder."""
    files: list[Path] = []
    # os.walk passes over a folder that vanishes while it looks, such as the half-written cache of another rank;
    # Path.rglob raises there.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [file for name in names if not name.startswith(".") and (file := Path(parent, name)).is_file()]
    return sorted(files)
