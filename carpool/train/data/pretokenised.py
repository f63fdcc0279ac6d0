"""Rows of tokens, such as those of files that another trainer made (`carpool.train.data.token_shards`).

Nothing is put before, after or between them. `labels` are as transformers has them: -100 where nothing is learned,
otherwise the token in the same place; they need examples that stay apart (`data.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.data.examples import Encoder, Example, Format
from carpool.train.data.rows import Fields, Row
from carpool.train.data.token_shards import INPUT_IDS
from carpool.train.data.tokenizer import Tokenizer

LABELS = "labels"


class TokensFormat(Format):
    name, row, streams = "tokens", "document", True

    def fields(self, data: DataSection) -> Fields:
        return Fields((INPUT_IDS,), (LABELS,), "data.format to what its rows are")

    def encoder(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None) -> Encoder:
        return Tokens(data, tokenizer)


class Tokens:
    """Examples of rows of tokens."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer) -> None:
        self.marks, self.vocab_size = data.packing not in (None, "stream"), tokenizer.vocab_size
        self._name, self.fingerprint = tokenizer.name, f"tokens {tokenizer.vocab_size}"

    def encode(self, rows: Sequence[Row]) -> Iterator[Example]:
        for row in rows:
            ids, labels = _numbers(row, INPUT_IDS), row.fields.get(LABELS)
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{row.where} has tokens {ids.min()} to {ids.max()}, but the tokenizer {self._name} has "
                    f"{self.vocab_size}: set data.tokenizer to the one that made them"
                )
            if labels is None:
                yield Example(ids.astype(np.uint32))
            elif not self.marks:
                raise ValueError(f'{row.where} has labels: set data.packing to "examples" or "off"')
            elif len(goals := _numbers(row, LABELS)) != len(ids) or not ((goals == ids) | (goals == -100)).all():
                raise ValueError(f"{row.where}: its {LABELS!r} are not its tokens, or -100, one for each of {len(ids)}")
            else:
                yield Example(ids.astype(np.uint32), goals != -100)

    def size(self, row: Row) -> int:
        ids = row.fields[INPUT_IDS]
        return 0 if ids is None or (isinstance(ids, list) and not ids) else 4 * _numbers(row, INPUT_IDS).size


def _numbers(row: Row, name: str) -> NDArray[np.integer[Any]]:
    """What a field holds. ValueError: it is no list of whole numbers."""
    try:
        found = np.asarray(row.fields[name])
    except ValueError:  # lists of several lengths
        found = np.empty(())
    if found.ndim != 1 or found.dtype.kind not in "ui":
        raise ValueError(f"{row.where}: the field {name!r} holds no list of whole numbers")
    return found
