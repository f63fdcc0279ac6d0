"""Files of tokens: Megatron's pairs of .bin and .idx, and shards of llm.c and modded-nanogpt (.bin).

A row has the field `input_ids` (the format "tokens"). Tokens are taken as they are: nothing is added to them.

Megatron's index (.idx): "MMIDIDX", padded by two zero bytes; version 1, 8 bytes; a code of the tokens' type, 1 byte;
sequences and documents, 8 bytes each; then lengths (int32) and byte offsets (int64) of sequences, and which sequence
each document begins with (int64). The tokens are in the .bin beside it. A row is a document.

A shard: 256 int32, of which the first three are a magic number, a version and the number of tokens; then the tokens, of
16 bits (magic 20240520) or 32 bits (20240801). A row is up to 65,536 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from carpool.train.data.rows import Fields, Reader, Row, Url

INPUT_IDS = "input_ids"
_INDEX = b"MMIDIDX\x00\x00"
# By Megatron's codes.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SHARDS = {20240520: "<u2", 20240801: "<u4"}
_PIECE = 1 << 16


class _OfTokens(Reader):
    def names(self, path: Path | Url, splits: Sequence[str]) -> list[str]:
        return [INPUT_IDS]


class Megatron(_OfTokens):
    name, what = "megatron", "Megatron index"
    endings = (".idx",)

    def files(self, path: Path) -> list[Path]:
        if not (tokens := path.with_suffix(".bin")).is_file():
            raise ValueError(f"{path} has no {tokens.name} beside it, which holds the tokens")
        return [path, tokens]

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        wanted.check([INPUT_IDS], str(path))
        path = _local(path, self.what)
        raw = path.read_bytes()
        code = raw[17] if len(raw) >= 34 else 0
        if not raw.startswith(_INDEX) or code not in _TYPES:
            raise ValueError(f"{path} is no index of Megatron's indexed data sets, or its tokens are no integers")
        sequences, documents = (int(one) for one in np.frombuffer(raw, "<i8", 2, 18))
        if len(raw) < 34 + 12 * sequences + 8 * documents:
            raise ValueError(f"{path} was cut off: it has {len(raw):,} bytes for {sequences:,} sequences")
        lengths = np.frombuffer(raw, "<i4", sequences, 34)
        begins = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
        ends = np.cumsum(lengths, dtype=np.int64)
        if not len(ends) or not ends[-1]:
            return
        tokens = _map(path.with_suffix(".bin"), _TYPES[code], int(ends[-1]), 0)
        # The list of documents ends with the number of sequences.
        for number, (first, last) in enumerate(pairwise(begins.tolist())):
            start = int(ends[first - 1]) if first else 0
            yield Row({INPUT_IDS: tokens[start : int(ends[last - 1])]}, f"{path}, document {number}")


class TokenShard(_OfTokens):
    name, what = "tokens", "shard of tokens"
    if_named = (".bin",)

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        wanted.check([INPUT_IDS], str(path))
        path = _local(path, self.what)
        with path.open("rb") as file:
            raw = file.read(1024)
        header = np.frombuffer(raw if len(raw) == 1024 else bytes(12), "<i4")
        if int(header[0]) not in _SHARDS:
            hint = "; name the .idx beside it" if path.with_suffix(".idx").is_file() else ""
            raise ValueError(f"{path} is no shard of tokens: it does not begin with 20240520 or 20240801{hint}")
        tokens = _map(path, _SHARDS[int(header[0])], int(header[2]), 1024)
        for start in range(0, len(tokens), _PIECE):
            yield Row({INPUT_IDS: tokens[start : start + _PIECE]}, f"{path}, from token {start}")


def _local(path: Path | Url, what: str) -> Path:
    if isinstance(path, Url):
        raise ValueError(f"{path}: a {what} is read from a local disk only: download it first")
    return path


def _map(path: Path, dtype: str, count: int, offset: int) -> np.memmap:
    need = offset + count * np.dtype(dtype).itemsize
    if not path.is_file() or path.stat().st_size < need:
        have = f"has {path.stat().st_size:,} bytes" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {have}; {need:,} bytes of tokens are needed")
    return np.memmap(path, dtype, "r", offset, count)
