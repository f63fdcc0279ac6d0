"""From documents to tokens on disk, once: every rank of every run maps the same two files.

    documents  ->  tokenize, put EOS after each  ->  train.bin, eval.bin, meta.json  ->  numpy memmaps

A cache entry is a folder named after a hash of all that it depends on: the files (paths, sizes, times of change),
the tokenizer, and the settings of `[data]` that matter. It is written beside its place and renamed into it, so that
it is there whole or not at all, even if several jobs build it at once. Tokens are 16-bit where the vocabulary
allows, otherwise 32-bit.

Held-out data is made of whole documents, so that no text is seen in part: with `eval_fraction` 0.05, every 20th
document, counted over all files, and never none (the last one, if there are fewer than 20).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.data.documents import describe_sources, find_sources, read_documents
from carpool.train.data.tokenizer import Tokenizer

# Part of every cache key: raised when the meaning of the files changes.
_FORMAT = 1
_BATCH_CHARACTERS = 1 << 20
_TRAIN_SPLITS = ("train",)
_EVAL_SPLITS = ("validation", "eval", "test")


@dataclass(frozen=True)
class _Meta:
    """What `meta.json` of a cache entry says."""

    dtype: str
    train_tokens: int
    eval_tokens: int
    train_documents: int
    eval_documents: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of a run, mapped from disk.

    Attributes:
        train: All training documents, an EOS after each; uint16 or uint32, one dimension.
        eval: The held-out documents in the same form; empty if there are none.
        fingerprint: A hash of the training tokens themselves: the same data has it on any machine.
        source: For people: where the data comes from.
    """

    train: NDArray[Any]
    eval: NDArray[Any]
    train_documents: int
    eval_documents: int
    fingerprint: str
    source: str


def prepare(
    data: DataSection, tokenizer: Tokenizer, *, build: bool = True, barrier: Callable[[], None] | None = None
) -> Corpus:
    """The tokens of `[data]`: from the cache, or else built and put there.

    In a distributed run every rank calls this: `build=(local_rank == 0), barrier=dist.barrier`. The builders of
    several nodes may share a folder.

    Args:
        data: What to read.
        tokenizer: How to tokenize it.
        build: May this process build the entry? The others find what a builder made.
        barrier: Called once by every process, after the builders have built.

    Raises:
        ValueError: no data, unreadable data (see `documents.py`), nothing to hold out, or a cache folder
            that cannot be written.
    """
    root = Path(data.cache_dir).expanduser() if data.cache_dir else default_cache_dir()
    entry = root / _key(data, tokenizer)
    if build and _load_meta(entry) is None:
        try:
            _build(entry, data, tokenizer)
        except OSError as error:
            raise ValueError(
                f"cannot keep tokens in {root}: {error}; make room, or set data.cache_dir to another folder"
            ) from error
    if barrier is not None:
        barrier()
    meta = _load_meta(entry)
    if meta is None:
        raise ValueError(
            f"the tokens that another rank should have built are not in {entry}: the files of data.train differ "
            "between nodes, or changed just now"
        )
    return Corpus(
        train=_map(entry / "train.bin", meta.dtype, meta.train_tokens),
        eval=_map(entry / "eval.bin", meta.dtype, meta.eval_tokens),
        train_documents=meta.train_documents,
        eval_documents=meta.eval_documents,
        fingerprint=meta.fingerprint,
        source=describe_sources(data.train),
    )


def check_sources(data: DataSection) -> None:
    """Raises the ValueError that `prepare` would for paths where nothing is; reads no file, so it is quick."""
    find_sources(data.train, "data.train")
    if data.eval is not None:
        find_sources(data.eval, "data.eval")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/carpool`, or `~/.cache/carpool`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "carpool"


def _key(data: DataSection, tokenizer: Tokenizer) -> str:
    evals = find_sources(data.eval, "data.eval") if data.eval is not None else None
    parts = {
        "format": _FORMAT,
        "train": [source.signature() for source in find_sources(data.train, "data.train")],
        "eval": data.eval_fraction if evals is None else [source.signature() for source in evals],
        "tokenizer": [tokenizer.fingerprint, tokenizer.eos_id, tokenizer.vocab_size],
        "text_field": data.text_field,
        "max_bytes": data.max_bytes,
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load_meta(entry: Path) -> _Meta | None:
    """The entry's description, or None if it is not there or not whole."""
    try:
        meta = _Meta(**json.loads((entry / "meta.json").read_text()))
        width = np.dtype(meta.dtype).itemsize
        sizes = [(entry / name).stat().st_size for name in ("train.bin", "eval.bin")]
    except (OSError, ValueError, TypeError):
        return None
    return meta if sizes == [meta.train_tokens * width, meta.eval_tokens * width] else None


def _map(path: Path, dtype: str, size: int) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)


class _Writer:
    """Appends tokenized documents to a file, in batches, because tokenizers are faster so."""

    def __init__(self, file: BinaryIO, dtype: str, tokenizer: Tokenizer) -> None:
        self._file, self._dtype, self._tokenizer = file, dtype, tokenizer
        self._texts: list[str] = []
        self._characters = 0
        self._hash = hashlib.sha256(dtype.encode())
        self.documents = 0
        self.tokens = 0

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._characters += len(text)
        if self._characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        eos = np.array([self._tokenizer.eos_id], dtype=self._dtype)
        for tokens in self._tokenizer.encode_batch(self._texts):
            raw = np.concatenate([tokens.astype(self._dtype), eos]).tobytes()
            self._hash.update(raw)
            self._file.write(raw)
            self.tokens += len(tokens) + 1
            self.documents += 1
        self._texts, self._characters = [], 0

    def close(self) -> str:
        """Writes what is pending, through to the disk; returns the hash of all."""
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()


def _build(entry: Path, data: DataSection, tokenizer: Tokenizer) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        with open(folder / "train.bin", "wb") as train_file, open(folder / "eval.bin", "wb") as eval_file:
            train, held = _Writer(train_file, dtype, tokenizer), _Writer(eval_file, dtype, tokenizer)
            for text, is_held in _split(data):
                (held if is_held else train).add(text)
            fingerprint = train.close()
            held.close()
        meta = _Meta(dtype, train.tokens, held.tokens, train.documents, held.documents, fingerprint)
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


def _split(data: DataSection) -> Iterator[tuple[str, bool]]:
    """Every document and whether it is held out.

    Worked example: eval_fraction 0.4, documents 0..6: 2, 4 are held out, because floor(0.4 i) rises after them.
    """
    train = _limited(read_documents(find_sources(data.train, "data.train"), data.text_field, _TRAIN_SPLITS), data)
    if data.eval is not None:
        some = False
        for text in train:
            some = True
            yield text, False
        if not some:
            raise ValueError(_no_text("data.train", data.train))
        some = False
        for text in read_documents(find_sources(data.eval, "data.eval"), data.text_field, _EVAL_SPLITS):
            some = True
            yield text, True
        if not some:
            raise ValueError(_no_text("data.eval", data.eval))
        return
    share = data.eval_fraction
    held = 0
    index = -1
    last: str | None = None
    # One document is kept back, because only at the end is it known whether the last one must be held out.
    for index, text in enumerate(train):
        if last is not None:
            yield last, False
            last = None
        if int((index + 1) * share) > int(index * share):
            held += 1
            yield text, True
        else:
            last = text
    if index < 0:
        raise ValueError(_no_text("data.train", data.train))
    if last is not None:
        must_hold = share > 0 and held == 0
        if must_hold and index == 0:
            raise ValueError(
                f"data.train ({describe_sources(data.train)}) has a single document, so none can be held out; name "
                "held-out files with data.eval, or set data.eval_fraction=0 to train without"
            )
        yield last, must_hold


def _limited(documents: Iterator[str], data: DataSection) -> Iterator[str]:
    total = 0
    for text in documents:
        yield text
        total += len(text.encode("utf-8", errors="replace"))
        if data.max_bytes is not None and total >= data.max_bytes:
            return


def _no_text(key: str, named: tuple[str, ...]) -> str:
    return f"{key} ({describe_sources(named)}) has no text: every file or row in it is empty"
