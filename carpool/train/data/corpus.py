"""From rows to tokens on disk, once: every rank of every run maps the same files.

    rows  ->  documents, an EOS after each  ->  train.bin, eval.bin, meta.json                  ->  numpy memmaps
          ->  examples, what is learned     ->  also train.learned, train.ends, and so for eval

Each source of a mixture (`data.sources`) and each set of `data.eval` has a cache entry. It is a folder named after a
hash of all that it depends on: the files (paths, sizes, times of change), the tokenizer, and the settings of `[data]`
that matter. It is written beside its place and renamed into it, so that
it is there whole or not at all, even if several jobs build it at once. Tokens are 16-bit where the vocabulary
allows, otherwise 32-bit.

Held-out data is made of whole rows, so that no text is seen in part: with `eval_fraction` 0.05, every 20th row, counted
over all files, and never none (the last one, if there are fewer than 20).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import Config, DataSection
from carpool.train.config.schema_data import TRAIN_SPLITS, DataSet
from carpool.train.data.examples import Encoder
from carpool.train.data.formats import FORMATS, fields_of, find_format
from carpool.train.data.readers import Source, read_rows
from carpool.train.data.rows import Row
from carpool.train.data.sources import describe_sources, sources_of
from carpool.train.data.tokenizer import Tokenizer

# Part of every cache key: raised when the meaning of the files changes.
_FORMAT = 3
_BATCH_CHARACTERS = 1 << 20
_STALE_SECONDS = 3600
_UNFINISHED = re.compile("[0-9a-f]{24}[.][a-z0-9_]{8}")  # `_key`, and what `mkdtemp` adds to it


@dataclass(frozen=True)
class _Meta:
    """What `meta.json` of a cache entry says."""

    dtype: str
    train_tokens: int
    eval_tokens: int
    train_documents: int
    eval_documents: int
    fingerprint: str
    # Examples; None: one stream of tokens.
    train_examples: int | None
    eval_examples: int | None


@dataclass(frozen=True, eq=False)
class Marks:
    """Where examples end in an array of tokens, and which of these are learned.

    Attributes:
        learned: (tokens,) bool.
        ends: (examples,) int64, rising: example i is the tokens from ends[i - 1], or 0, to before ends[i].
    """

    learned: NDArray[np.bool_]
    ends: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of one source of data, or of one held-out set, mapped from disk.

    Attributes:
        train: All training documents or examples, one after the other; uint16 or uint32, one dimension.
        eval: What is held out, in the same form; empty if nothing is.
        train_documents: How many documents, conversations or prompts.
        fingerprint: A hash of the training tokens and marks themselves: the same data has it on any machine.
        source: For people: where the data comes from.
        train_marks: Of examples; None: the tokens are one stream, an EOS after each document.
        of: Which source or set; None: what `data.train` names.
    """

    train: NDArray[Any]
    eval: NDArray[Any]
    train_documents: int
    eval_documents: int
    fingerprint: str
    source: str
    train_marks: Marks | None = None
    eval_marks: Marks | None = None
    of: DataSet | None = None

    @property
    def key(self) -> str:
        """The setting that names it, for errors."""
        return "data.train" if self.of is None else self.of.key


@dataclass(frozen=True, eq=False)
class Corpora:
    """Tokens of a run: of each source, and of each set that `data.eval` names."""

    sources: tuple[Corpus, ...]
    held_out: tuple[Corpus, ...] = ()

    @property
    def source(self) -> str:
        """For people: where the training data comes from."""
        return "; ".join(corpus.source for corpus in self.sources)

    @property
    def fingerprint(self) -> str:
        """A hash of the training tokens and marks themselves."""
        found = [corpus.fingerprint for corpus in self.sources]
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()

    @property
    def held_tokens(self) -> int:
        """How many tokens are held out."""
        return sum(len(one.train) for one in self.held_out) or sum(len(one.eval) for one in self.sources)

    @property
    def tokens(self) -> list[tuple[NDArray[Any], Marks | None]]:
        """All arrays of tokens, with their marks."""
        of_sources = [
            pair for one in self.sources for pair in ((one.train, one.train_marks), (one.eval, one.eval_marks))
        ]
        return of_sources + [(one.train, one.train_marks) for one in self.held_out]


def prepare_all(
    data: DataSection, tokenizer: Tokenizer, model_path: str | None = None, *, build: bool = True
) -> Corpora:
    """The tokens of `[data]`: see `prepare`. Of streamed data, those that are held out."""
    sources, held_out = data_sets(data)
    found = [
        tuple(prepare(one, tokenizer, model_path, build=build) for one in sets)
        for sets in ([] if data.streaming else sources, held_out)
    ]
    return Corpora(*found)


def data_sets(data: DataSection) -> tuple[list[DataSet], list[DataSet]]:
    """The sources and the held-out sets of `[data]`, all with examples if a source has some and nothing else is said.

    Raises:
        ValueError: nothing there, or the first file of one cannot be read."""
    sets = [data.train_sets(), data.eval_sets()]
    if data.packing is None and len(sets[0] + sets[1]) > 1:
        streams = [[FORMATS[_format(one)[0]].streams for one in some] for some in sets]
        if not all(map(all, streams)):
            packing: Literal["stream", "examples"] = "stream" if all(streams[0]) else "examples"
            sets = [[one.with_packing(packing) for one in some] for some in sets]
    return sets[0], sets[1]


def _format(one: DataSet) -> tuple[str, list[Source]]:
    sources = sources_of(one)
    return find_format(one.data, sources, one.splits), sources


def make_encoder(one: DataSet, tokenizer: Tokenizer, model_path: str | None) -> tuple[Encoder, str, list[Source]]:
    """What makes examples of its rows, their format, and what is read.

    Raises:
        ValueError: as `carpool.train.data.examples.Format.encoder`, or the format has no place in a stream."""
    form, sources = _format(one)
    if one.data.packing == "stream" and not FORMATS[form].streams:
        raise ValueError(
            f'{one.key} has {form} rows, which are not laid end to end as those of data.packing="stream" are (the '
            'default where all training data is documents): set data.packing to "examples" or "off"'
        )
    return FORMATS[form]().encoder(one.data, tokenizer, model_path), form, sources


def prepare(
    of: DataSection | DataSet,
    tokenizer: Tokenizer,
    model_path: str | None = None,
    *,
    build: bool = True,
) -> Corpus:
    """The tokens of one source or set: from the cache, or else built and put there.

    In a distributed run one rank of each node builds, and the others call this with `build=False` once it has. The
    builders of several nodes may share a folder.

    Args:
        of: What to read; of a section, its `train`, with what `eval_fraction` holds out.
        tokenizer: How to tokenize documents.
        model_path: `model.path`, whose folder has the tokenizer and the chat template of conversations.
        build: May this process build the entry? The others find what a builder made.

    Raises:
        ValueError: no data, unreadable data (see `rows.py`, `chat.py`), nothing to hold out, or a cache folder
            that cannot be written.
    """
    one = of if isinstance(of, DataSet) else DataSet("train", "data.train", of)
    data = one.data
    root = Path(data.cache_dir).expanduser() if data.cache_dir else default_cache_dir()
    encoder, form, sources = make_encoder(one, tokenizer, model_path)
    entry = root / _key(one, form, encoder, sources)
    if build and _load_meta(entry) is None:
        try:
            _build(entry, one, form, encoder, "uint16" if encoder.vocab_size <= 1 << 16 else "uint32")
        except OSError as error:
            raise ValueError(
                f"cannot keep tokens in {root}: {error}; free some space, or set data.cache_dir to another folder"
            ) from error
    meta = _load_meta(entry)
    if meta is None:
        raise ValueError(
            f"the tokens that another rank should have built are not in {entry}: the files of {one.key} are not "
            "the same on all nodes, or changed just now"
        )
    return Corpus(
        train=_map(entry / "train.bin", meta.dtype, meta.train_tokens),
        eval=_map(entry / "eval.bin", meta.dtype, meta.eval_tokens),
        train_documents=meta.train_documents,
        eval_documents=meta.eval_documents,
        fingerprint=meta.fingerprint,
        source=describe_sources(data.train),
        train_marks=_map_marks(entry, "train", meta.train_tokens, meta.train_examples),
        eval_marks=_map_marks(entry, "eval", meta.eval_tokens, meta.eval_examples),
        of=one,
    )


def check_sources(data: DataSection) -> list[Source]:
    """The sources of the training data. Raises the ValueError that `prepare_all` would for paths where nothing is;
    reads no file, so it is quick."""
    found = [source for one in data.train_sets() for source in sources_of(one)]
    for one in data.eval_sets():
        sources_of(one)
    return found


def corpus_of(config: Config, tokenizer: Tokenizer, *, build: bool = True) -> Corpora:
    """The tokens of a run: see `prepare`."""
    return prepare_all(config.data, tokenizer, config.model.path, build=build)


def check_encoder(config: Config, tokenizer: Tokenizer) -> None:
    """Raises the ValueError that `prepare_all` would before it reads more than first rows: no tokenizer of
    transformers, no chat template, settings that the format of the rows has no use for."""
    sources, held_out = data_sets(config.data)
    for one in sources + held_out:
        make_encoder(one, tokenizer, config.model.path)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/carpool`, or `~/.cache/carpool`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "carpool"


def _key(one: DataSet, form: str, encoder: Encoder, sources: list[Source]) -> str:
    parts = {
        "format": _FORMAT,
        "train": [source.signature() for source in sources],
        "eval": one.data.eval_fraction,
        "fields": [form, *fields_of(one.data, form).required],
        "encoder": encoder.fingerprint,
        "marks": encoder.marks,
        "max_bytes": one.data.max_bytes,
        **({} if one.splits == TRAIN_SPLITS else {"splits": one.splits}),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load_meta(entry: Path) -> _Meta | None:
    """The entry's description, or None if it is not there or not whole."""
    try:
        meta = _Meta(**json.loads((entry / "meta.json").read_text()))
        width = np.dtype(meta.dtype).itemsize
        for name in ("train", "eval"):
            tokens, examples = getattr(meta, f"{name}_tokens"), getattr(meta, f"{name}_examples")
            sizes = {".bin": tokens * width}
            if examples is not None:
                sizes |= {".learned": tokens, ".ends": 8 * examples}
            if any((entry / f"{name}{ending}").stat().st_size != size for ending, size in sizes.items()):
                return None
    except (OSError, ValueError, TypeError):
        return None
    return meta


def _map(path: Path, dtype: str, size: int) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)


def _map_marks(entry: Path, name: str, tokens: int, examples: int | None) -> Marks | None:
    if examples is None:
        return None
    learned, ends = (
        _map(entry / f"{name}.learned", "bool", tokens),
        _map(entry / f"{name}.ends", "int64", examples),
    )
    return Marks(learned, ends)


class _Writer:
    """Appends what rows become to files, in batches, because tokenizers are faster so."""

    def __init__(self, folder: Path, name: str, dtype: str, encoder: Encoder, files: ExitStack) -> None:
        def open_file(ending: str) -> BinaryIO:
            return files.enter_context(open(folder / f"{name}{ending}", "wb"))

        self._dtype, self._encoder = dtype, encoder
        self._tokens = open_file(".bin")
        self._marks = (open_file(".learned"), open_file(".ends")) if encoder.marks else None
        self._rows: list[Row] = []
        self._characters = 0
        self._hash = hashlib.sha256(dtype.encode())
        self.documents = self.tokens = self.examples = 0

    def lock(self) -> None:
        """For as long as it writes."""
        with suppress(OSError):
            fcntl.flock(self._tokens, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self._characters += self._encoder.size(row)
        if self._characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        for ids, learned in self._encoder.encode(self._rows):
            raw = ids.astype(self._dtype).tobytes()
            self._hash.update(raw)
            self._tokens.write(raw)
            self.tokens += len(ids)
            self.examples += 1
            if self._marks is not None:
                marks = (np.ones(len(ids), dtype=bool) if learned is None else learned).tobytes()
                self._hash.update(marks)
                self._marks[0].write(marks)
                self._marks[1].write(np.int64(self.tokens).tobytes())
        self.documents += len(self._rows)
        self._rows, self._characters = [], 0

    def close(self) -> str:
        """Writes what is pending, through to the disk; returns the hash of all."""
        self.flush()
        for file in (self._tokens, *(self._marks or ())):
            file.flush()
            os.fsync(file.fileno())
        return self._hash.hexdigest()


def _build(entry: Path, one: DataSet, form: str, encoder: Encoder, dtype: str) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(entry.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        with ExitStack() as files:
            train, held = (_Writer(folder, name, dtype, encoder, files) for name in ("train", "eval"))
            train.lock()
            for row, is_held in _split(one, form, encoder):
                (held if is_held else train).add(row)
            fingerprint = train.close()
            held.close()
        examples = (train.examples, held.examples) if encoder.marks else (None, None)
        meta = _Meta(dtype, train.tokens, held.tokens, train.documents, held.documents, fingerprint, *examples)
        (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
        if entry.exists():
            if _load_meta(entry) is not None:
                return  # another job was faster
            shutil.rmtree(entry)
        try:
            os.rename(folder, entry)
        except OSError:
            if _load_meta(entry) is None:
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(root: Path) -> None:
    """Removes what builders left that were killed. Who still builds holds a lock, and where there are no locks between
    nodes, it has written in the last hour. What has another name is not theirs: people name this folder."""
    for folder in root.iterdir():
        if not _UNFINISHED.fullmatch(folder.name):
            continue
        with suppress(OSError), (folder / "train.bin").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _split(one: DataSet, form: str, encoder: Encoder) -> Iterator[tuple[Row, bool]]:
    """Every row and whether it is held out.

    Worked example: eval_fraction 0.4, rows 0..6: 2, 4 are held out, because floor(0.4 i) rises after them.
    """
    data = one.data
    found = read_rows(sources_of(one), fields_of(data, form), one.splits)
    train = _limited((row for row in found if encoder.size(row)), data, encoder)
    share = data.eval_fraction
    held = 0
    index = -1
    last: Row | None = None
    # One row is kept back, because only at the end is it known whether the last one must be held out.
    for index, row in enumerate(train):
        if last is not None:
            yield last, False
            last = None
        if int((index + 1) * share) > int(index * share):
            held += 1
            yield row, True
        else:
            last = row
    if index < 0:
        raise ValueError(f"{one.key} ({describe_sources(data.train)}) has no text: every file or row in it is empty")
    if last is not None:
        must_hold = share > 0 and held == 0
        if must_hold and index == 0:
            raise ValueError(
                f"{one.key} ({describe_sources(data.train)}) has a single {FORMATS[form].row}, so none can be held "
                "out; name held-out files with data.eval, or set data.eval_fraction=0 to train without"
            )
        yield last, must_hold


def _limited(rows: Iterator[Row], data: DataSection, encoder: Encoder) -> Iterator[Row]:
    total = 0
    for row in rows:
        yield row
        if data.max_bytes is not None:
            total += encoder.size(row)
            if total >= data.max_bytes:
                return
