"""Files of what a teacher says of each token: Parquet, a row for each sequence (docs/reference/distillation.md).

Sequences are numbered as in `carpool.train.data.sequences`. Shuffled steps read row by row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carpool.hf.weights.model_config import read_config
from carpool.kernels.distillation import IDS, LOG_PROBS
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.data.loader import Batch
from carpool.train.data.sequences import Ids, Sequences
from carpool.train.data.tokenizer import FileTokenizer, Tokenizer

COLUMNS = ("sequence", "input_ids", "token_ids", "log_probs")
_KEY = b"carpool"
_GROUP_BYTES = 2**20
# By how much the probabilities of a token may sum up to more than 1.
_ROUNDING = 0.02
# Sequences that the tokenizers of the teacher and of the data must read alike.
_COMPARED = 32
_AGAIN = "mend the row, or remove the file and let `carpool teach` write its sequences"
# Row groups of which each rank reads rows before the first step.
_SAMPLED = 256
# As `COLUMNS`.
Row = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]


def check_teacher(folder: Path, tokenizer: Tokenizer, sequences: Sequences | None, words: int | None) -> None:
    """Raise ValueError if the teacher in that folder has another number of words than its student (None: less than the
    tokenizer), or a tokenizer that reads other text in the first sequences (None: these are not known)."""
    theirs = read_config(folder).get_text_config(decoder=True).vocab_size
    if theirs != (words := words or max(theirs, tokenizer.vocab_size)):
        raise ValueError(
            f"the teacher in {folder} has a vocabulary of {theirs:,}, and the model of {words:,}: a probability of the "
            "one is none of the other; take a teacher with the model's tokenizer"
        )
    if sequences is None or not (folder / "tokenizer.json").is_file():
        return
    other = FileTokenizer(folder)
    for number in range(min(_COMPARED, len(sequences))):
        ids = sequences[number].ids.tolist()
        ours, text = tokenizer.decode(ids), other.decode(ids)
        if ours != text:
            place = next((i for i, pair in enumerate(zip(ours, text, strict=False)) if len(set(pair)) > 1), 0)
            raise ValueError(
                f"the teacher in {folder} has another tokenizer than the data ({tokenizer.name}): tokens of sequence "
                f"{number} are {text[place:][:40]!r} to it, and {ours[place:][:40]!r} to the model; take another"
            )


class TeacherLogits:
    """The rows in the folder `distillation.logits`, by the number of their sequence.

    Args:
        distillation: with `top_k`, only so many of the likeliest words.
        words: V, of the student's vocabulary; None: it is not known.

    Raises:
        ValueError: files without these columns, of another temperature, or with fewer words than top_k."""

    def __init__(self, distillation: DistillationSection, words: int | None = None) -> None:
        import pyarrow.parquet

        self.folder, self._words = Path(str(distillation.logits)), words
        self._paths, sizes, count = sorted(self.folder.glob("*.parquet")), set[int](), 0
        self._files: list[Any] = []
        # By sequence: the file, the row group, and the row in it.
        self._places: dict[int, tuple[int, int, int]] = {}
        for number, path in enumerate(self._paths):
            try:
                file = pyarrow.parquet.ParquetFile(path, memory_map=True)
                _as_written(file.schema_arrow.empty_table())
                said = float(json.loads((file.schema_arrow.metadata or {}).get(_KEY, b"{}")).get("temperature", 1))
            except (pyarrow.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is not as docs/reference/distillation.md says: {error}") from error
            if said != distillation.temperature:
                raise ValueError(
                    f"{path} has probabilities of the temperature {said:g}, but distillation.temperature = "
                    f"{distillation.temperature:g}: set that to {said:g}, or write the file again"
                )
            self._files.append(file)
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            rows = [(number, group, row) for group, size in enumerate(groups) for row in range(size)]
            self._places |= zip(file.read(["sequence"])["sequence"].to_pylist(), rows, strict=True)
            if len(self._places) != (count := count + len(rows)):
                raise ValueError(f"{path} has a row for a sequence that has one already, here or in another file")
            sizes |= {self._read(place)[0].shape[1] for place in rows[:1]}
        self.top_k = distillation.top_k or min(sizes, default=0)
        if sizes and self.top_k > min(sizes):
            raise ValueError(
                f"distillation.top_k = {self.top_k}, but files in {self.folder} have {min(sizes)} words of each token: "
                "set it to that at most"
            )

    def check(self, sequences: Sequences, rank: int = 0, ranks: int = 1) -> list[int]:
        """The sequences that have no row. Each of several ranks compares the tokens of some row groups, and looks at
        what a sample of their rows says: at one of a group, and at all where statistics of the file do not look right.

        Raises:
            ValueError: a row has other tokens than its sequence, is of none, or says what cannot be."""
        for path, file in zip(self._paths, self._files, strict=True):
            for batch in file.iter_batches(row_groups=range(rank, file.num_row_groups, ranks), columns=COLUMNS[:2]):
                for number, ids in zip(batch["sequence"].to_pylist(), batch["input_ids"], strict=True):
                    known = sequences[number].ids if number in range(len(sequences)) else None
                    if known is None or not np.array_equal(known, np.asarray(ids.values)):
                        raise ValueError(
                            f"{path}: the row of sequence {number} has other tokens than the data: it was written with "
                            "another tokenizer, other data, or another data.sequence_length or packing; write all "
                            "again into an empty folder, with the settings of this run"
                        )
        groups: dict[tuple[int, int], list[int]] = {}
        for number, (file, group, _) in self._places.items():
            groups.setdefault((file, group), []).append(number)
        own = list(groups.items())[rank::ranks]
        odd = [rows for place, rows in own if not self._may_be_right(*place)]
        sample = [rows[-1:] for _, rows in own[:: 1 + len(own) // _SAMPLED]]
        for number in (number for rows in odd[:_SAMPLED] + sample for number in rows):
            self[number]
        return [number for number in range(len(sequences)) if number not in self._places]

    def _may_be_right(self, file: int, group: int) -> bool:
        """By the file's statistics of a row group. They count last tokens, of which nothing is read."""
        about = self._files[file].metadata.row_group(group)
        columns = {one.path_in_schema.split(".")[0]: one for one in map(about.column, range(about.num_columns))}
        tokens, ids, log_probs = (columns[name] for name in COLUMNS[1:])
        right = ids.num_values == log_probs.num_values and ids.num_values % tokens.num_values == 0
        for one, least, most in ((ids, 0, (self._words or 2**31) - 1), (log_probs, -np.inf, _ROUNDING)):
            known = one.statistics
            right &= known is None or (known.has_min_max and least <= known.min and known.max <= most)
        return bool(right)

    def __getitem__(self, sequence: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(L - 1, K) words, and their log-probabilities, of all tokens but the last.

        Raises:
            ValueError: they cannot be those of a token."""
        place = self._places[sequence]
        ids_LK, log_LK = self._read(place)
        if self.top_k < ids_LK.shape[1]:
            order_LK = np.argsort(-log_LK, axis=1, kind="stable")[:, : self.top_k]
            ids_LK, log_LK = np.take_along_axis(ids_LK, order_LK, 1), np.take_along_axis(log_LK, order_LK, 1)
        wrong = ids_LK[(ids_LK < 0) | (ids_LK >= (self._words or 2**31))]
        why = f"has word {wrong[0]} for a token, of {self._words:,}" if len(wrong) else ""
        if ids_LK.shape[1] < self.top_k:
            why = f"has {ids_LK.shape[1]} words for each token, and others have {self.top_k}"
        elif (np.diff(np.sort(ids_LK, axis=1), axis=1) == 0).any():
            why = why or "has a word twice for one token"
        elif not np.exp(log_LK).sum(1).max(initial=0.0) <= 1 + _ROUNDING:
            why = why or "has probabilities that sum up to more than 1, or are no numbers"
        if why:
            raise ValueError(f"{self._paths[place[0]]}: the row of sequence {sequence} {why}; {_AGAIN}")
        return ids_LK, log_LK

    def batch(self, sequences: Ids, length: int) -> Batch:
        """What a batch of these, filled up to `length`, has besides: see `carpool.kernels.distillation`."""
        ids_BLK = torch.zeros(len(sequences), length, self.top_k, dtype=torch.int32)
        log_BLK = torch.zeros(ids_BLK.shape)
        for place, number in enumerate(sequences.tolist()):
            ids_LK, log_LK = self[number]
            ids_BLK[place, : len(ids_LK)], log_BLK[place, : len(log_LK)] = map(torch.from_numpy, (ids_LK, log_LK))
        return {IDS: ids_BLK, LOG_PROBS: log_BLK}

    def _read(self, place: tuple[int, int, int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        number, group, row = place
        found = _as_written(self._files[number].read_row_group(group, columns=list(COLUMNS)).slice(row, 1))
        sequence, tokens, *both = (found[name].combine_chunks() for name in COLUMNS)
        length, both = len(tokens.flatten()), [one.flatten() for one in both]
        ids, log_probs = (one.flatten() for one in both)
        words = {size for one in both for size in one.value_lengths().unique().to_pylist()}
        if {len(one) for one in both} != {length} or len(words) != 1 or None in words or ids.null_count:
            raise ValueError(
                f"{self._paths[number]}: the row of sequence {sequence[0]} has not equally many words and "
                f"log-probabilities for each of its {length} tokens; {_AGAIN}"
            )
        return np.array(ids).reshape(length, -1)[:-1], np.array(log_probs).reshape(length, -1)[:-1]


def write_rows(folder: Path, rows: Listed[Row], temperature: float) -> None:
    """A file of these rows, which is there when it is whole."""
    import pyarrow.parquet

    numbers, tokens, *both = zip(*rows, strict=True)
    nested = [[list(one) for one in some] for some in both]
    said = {_KEY: json.dumps({"temperature": temperature})}
    table = pyarrow.table(dict(zip(COLUMNS, (numbers, tokens, *nested), strict=True)), metadata=said)
    path = folder / f"sequence-{numbers[0]:09d}.parquet"
    group = max(1, _GROUP_BYTES // (both[0][0].size * 8))
    partial = path.with_suffix(".writing")
    try:
        pyarrow.parquet.write_table(table, partial, row_group_size=group, compression="zstd")
    except OSError as error:  # of a full disk, without its place
        raise OSError(error.errno, error.strerror, str(folder)) from error
    os.replace(partial, path)


def _as_written(table: Any) -> Any:
    """The columns of such a table, with the types that this module writes."""
    import pyarrow

    lists = [pyarrow.list_(pyarrow.list_(kind)) for kind in (pyarrow.int32(), pyarrow.float32())]
    types = (pyarrow.int64(), pyarrow.list_(pyarrow.int32()), *lists)
    return table.select(COLUMNS).cast(pyarrow.schema(zip(COLUMNS, types, strict=True)))
