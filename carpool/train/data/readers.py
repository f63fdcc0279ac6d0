"""How files are read: the registry of readers, one for each kind of file. The next kind is one class:

class Lyrics(Reader):
    name, what, endings = "lyrics", "file of songs", (".lrc",)

    def rows(self, path, wanted, splits):
        with open_file(path) as file:
            for number, line in enumerate(file, start=1):
                yield Row({"text": line.decode()}, f"{path}, line {number}")

READERS.register(Lyrics)            or an entry point in the group "carpool.data_readers"
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec

from carpool.plugins import Registry
from carpool.plugins.redact import redact
from carpool.train.data.rows import Fields, JsonFile, Reader, Row, TextFile, Url
from carpool.train.data.tables import Csv, Parquet, SavedDataset
from carpool.train.data.token_shards import Megatron, TokenShard

__all__ = ["READERS", "Source", "field_names", "read_rows", "reader_name"]

_BUILT_IN = (JsonFile, Parquet, Csv, Megatron, TokenShard, SavedDataset, TextFile)
READERS: Registry[type[Reader]] = Registry(
    "reader of data", "carpool.data_readers", {reader.name: reader for reader in _BUILT_IN}
)


@dataclass(frozen=True)
class Source:
    """One file, or one dataset folder, and the name of its reader."""

    kind: str
    path: Path | Url

    def signature(self) -> list[tuple[str, int, int | str]]:
        """`(absolute path, bytes, mtime in ns)` of each file it consists of: changes when the data does. Of a store's
        file, what the store says of its version."""
        if isinstance(self.path, Url):
            with _readable(self):
                file_system, place = fsspec.core.url_to_fs(self.path.address)
                info = file_system.info(place)
            version = next(
                (info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if key in info), ""
            )
            return [(str(self.path), int(info.get("size") or 0), str(version))]
        files = READERS[self.kind]().files(self.path)
        return [(str(f.absolute()), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]


def reader_name(path: Path | Url, in_folder: bool = False) -> str | None:
    """The reader of a file, by its ending; None: no ending of a kind is known. `in_folder`: it is not named itself."""
    name = path.name.lower()
    for kind in READERS:
        reader = READERS[kind]
        if name.endswith(reader.endings if in_folder else reader.endings + reader.if_named):
            return kind
    return None


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
        with _readable(source):
            yield from READERS[source.kind]().rows(source.path, wanted, splits)


def field_names(source: Source, splits: Sequence[str]) -> list[str]:
    """The fields of its first row; none if it has no rows, or is a text file. ValueError: as `read_rows`."""
    with _readable(source):
        return READERS[source.kind]().names(source.path, splits)


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{source.path} is no intact gzip file: {error}") from None
    except Exception as error:
        # A store raises what its package has, and may say what it was given.
        address = source.path.address if isinstance(source.path, Url) else ""
        if not address and (isinstance(error, ValueError) or not isinstance(error, OSError)):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{source.path} cannot be read: {error}"
        raise ValueError(redact(text, address)) from None
