"""Parquet files of a teacher's top-k log-probabilities, with a row for each sequence (docs/reference/distillation.md).

Sequences are numbered as in `carpool.train.data.sequences`. A shuffled step reads single rows.
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
# The probabilities of a position may sum to this much more than 1.
_ROUNDING = 0.02
# The tokenizers of the teacher and of the data must decode this many sequences alike.
_COMPARED_SEQUENCES = 32
_FIX = "mend the row, or remove the file and let `carpool teach` write its sequences"
# Each rank reads rows of at most this many row groups before the first step.
_SAMPLED_ROW_GROUPS = 256
# The values of `COLUMNS`.
Row = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]


def check_teacher(folder: Path, tokenizer: Tokenizer, sequences: Sequences | None, vocab_size: int | None) -> None:
    """Raise ValueError if the teacher in that folder has another vocabulary size than its student (None: a smaller one
    than the tokenizer), or a tokenizer that decodes the first sequences (None: unknown) to other text."""
    teacher_size = read_config(folder).get_text_config(decoder=True).vocab_size
    if teacher_size != (vocab_size := vocab_size or max(teacher_size, tokenizer.vocab_size)):
        raise ValueError(
            f"the teacher in {folder} has a vocabulary of {teacher_size:,} tokens, and the model one of "
            f"{vocab_size:,}, so their probabilities cannot be compared: take a teacher with the model's tokenizer"
        )
    if sequences is None or not (folder / "tokenizer.json").is_file():
        return
    teacher_tokenizer = FileTokenizer(folder)
    for number in range(min(_COMPARED_SEQUENCES, len(sequences))):
        ids = sequences[number].ids.tolist()
        texts = tokenizer.decode(ids), teacher_tokenizer.decode(ids)
        if texts[0] != texts[1]:
            start = next((i for i, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
            raise ValueError(
                f"the teacher in {folder} has another tokenizer than the data ({tokenizer.name}): sequence {number} is "
                f"{texts[1][start:][:40]!r} by the teacher's and {texts[0][start:][:40]!r} by the data's; take another"
            )


class TeacherLogits:
    """The rows in the folder `distillation.logits`, by the number of their sequence.

    Args:
        distillation: names the folder. Its `top_k` limits the log-probabilities of each position to the largest.
        vocab_size: V, the student's vocabulary; None if it is unknown.

    Raises:
        ValueError: files lack columns, have another temperature, or have fewer log-probabilities than `top_k`."""

    def __init__(self, distillation: DistillationSection, vocab_size: int | None = None) -> None:
        import pyarrow.parquet

        self.folder, self._vocab_size = Path(str(distillation.logits)), vocab_size or 2**31
        self._paths, sizes, count = sorted(self.folder.glob("*.parquet")), set[int](), 0
        self._files: list[Any] = []
        # For each sequence: the file, the row group, and the row in it.
        self._places: dict[int, tuple[int, int, int]] = {}
        for number, path in enumerate(self._paths):
            try:
                file = pyarrow.parquet.ParquetFile(path, memory_map=True)
                _with_schema(file.schema_arrow.empty_table())
                temperature = float(
                    json.loads((file.schema_arrow.metadata or {}).get(_KEY, b"{}")).get("temperature", 1)
                )
            except (pyarrow.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} has not the format of docs/reference/distillation.md: {error}") from error
            if temperature != distillation.temperature:
                raise ValueError(
                    f"{path} has probabilities at temperature {temperature:g}, but distillation.temperature = "
                    f"{distillation.temperature:g}: set it to {temperature:g}, or write the file again"
                )
            self._files.append(file)
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            rows = [(number, group, row) for group, size in enumerate(groups) for row in range(size)]
            self._places |= zip(file.read(["sequence"])["sequence"].to_pylist(), rows, strict=True)
            if len(self._places) != (count := count + len(rows)):
                raise ValueError(f"{path} has a second row for a sequence; the first is in this file or in another one")
            sizes |= {self._read(place)[0].shape[1] for place in rows[:1]}
        self.top_k = distillation.top_k or min(sizes, default=0)
        if sizes and self.top_k > min(sizes):
            raise ValueError(
                f"distillation.top_k = {self.top_k}, but files in {self.folder} have {min(sizes)} log-probabilities "
                f"for each token: set it to {min(sizes)} at most"
            )

    def check(self, sequences: Sequences, rank: int = 0, ranks: int = 1) -> list[int]:
        """Returns the sequences that have no row. Each of several ranks compares the tokens of its share of the row
        groups, and checks a sample of their rows: one row of a group, or all rows if the group's statistics are odd.

        Raises:
            ValueError: a row has other tokens than its sequence, has no sequence, or holds impossible values."""
        for path, file in zip(self._paths, self._files, strict=True):
            for batch in file.iter_batches(row_groups=range(rank, file.num_row_groups, ranks), columns=COLUMNS[:2]):
                for number, ids in zip(batch["sequence"].to_pylist(), batch["input_ids"], strict=True):
                    expected = sequences[number].ids if number in range(len(sequences)) else None
                    if expected is None or not np.array_equal(expected, np.asarray(ids.values)):
                        raise ValueError(
                            f"{path}: the row of sequence {number} has other tokens than the data: it was written with "
                            "another tokenizer, other data, or another data.sequence_length or packing; write all "
                            "rows again into an empty folder, with the settings of this run"
                        )
        groups: dict[tuple[int, int], list[int]] = {}
        for number, (file, group, _) in self._places.items():
            groups.setdefault((file, group), []).append(number)
        share = list(groups.items())[rank::ranks]
        odd = [rows for place, rows in share if not self._has_valid_statistics(*place)]
        sample = [rows[-1:] for _, rows in share[:: 1 + len(share) // _SAMPLED_ROW_GROUPS]]
        for number in (number for rows in odd[:_SAMPLED_ROW_GROUPS] + sample for number in rows):
            self[number]
        return [number for number in range(len(sequences)) if number not in self._places]

    def _has_valid_statistics(self, file: int, group: int) -> bool:
        """Whether a row group's sizes and ranges are possible. They include last tokens, whose values are not read."""
        metadata = self._files[file].metadata.row_group(group)
        columns = {c.path_in_schema.split(".")[0]: c for c in map(metadata.column, range(metadata.num_columns))}
        tokens, ids, log_probs = (columns[name] for name in COLUMNS[1:])
        valid = ids.num_values == log_probs.num_values and ids.num_values % tokens.num_values == 0
        for column, least, most in ((ids, 0, self._vocab_size - 1), (log_probs, -np.inf, _ROUNDING)):
            values = column.statistics
            valid &= values is None or (values.has_min_max and least <= values.min and values.max <= most)
        return bool(valid)

    def __getitem__(self, sequence: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns token ids and their log-probabilities, each (L - 1, K), for all positions but the last.

        Raises:
            ValueError: the ids or the probabilities are impossible."""
        place = self._places[sequence]
        ids_LK, log_LK = self._read(place)
        if self.top_k < ids_LK.shape[1]:
            order_LK = np.argsort(-log_LK, axis=1, kind="stable")[:, : self.top_k]
            ids_LK, log_LK = np.take_along_axis(ids_LK, order_LK, 1), np.take_along_axis(log_LK, order_LK, 1)
        invalid = ids_LK[(ids_LK < 0) | (ids_LK >= self._vocab_size)]
        why = f"has the token id {invalid[0]}, but ids are 0 to {self._vocab_size - 1}" if len(invalid) else ""
        if ids_LK.shape[1] < self.top_k:
            why = f"has {ids_LK.shape[1]} log-probabilities for each token, and other rows have {self.top_k}"
        elif (np.diff(np.sort(ids_LK, axis=1), axis=1) == 0).any():
            why = why or "has a token id twice at one position"
        elif not np.exp(log_LK).sum(1).max(initial=0.0) <= 1 + _ROUNDING:
            why = why or "has probabilities that sum to more than 1, or are NaN"
        if why:
            raise ValueError(f"{self._paths[place[0]]}: the row of sequence {sequence} {why}; {_FIX}")
        return ids_LK, log_LK

    def batch(self, sequences: Ids, length: int) -> Batch:
        """Returns the keys `IDS` and `LOG_PROBS` of a batch of these sequences, padded to `length`."""
        ids_BLK = torch.zeros(len(sequences), length, self.top_k, dtype=torch.int32)
        log_BLK = torch.zeros(ids_BLK.shape)
        for place, number in enumerate(sequences.tolist()):
            ids_LK, log_LK = self[number]
            ids_BLK[place, : len(ids_LK)], log_BLK[place, : len(log_LK)] = map(torch.from_numpy, (ids_LK, log_LK))
        return {IDS: ids_BLK, LOG_PROBS: log_BLK}

    def _read(self, place: tuple[int, int, int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        number, group, row = place
        table = _with_schema(self._files[number].read_row_group(group, columns=list(COLUMNS)).slice(row, 1))
        sequence, tokens, *nested = (table[name].combine_chunks() for name in COLUMNS)
        length, lists = len(tokens.flatten()), [column.flatten() for column in nested]
        ids, log_probs = (column.flatten() for column in lists)
        sizes = {size for column in lists for size in column.value_lengths().unique().to_pylist()}
        if {len(column) for column in lists} != {length} or len(sizes) != 1 or None in sizes or ids.null_count:
            raise ValueError(
                f"{self._paths[number]}: the row of sequence {sequence[0]} has not equally many token ids and "
                f"log-probabilities for each of its {length} tokens; {_FIX}"
            )
        return np.array(ids).reshape(length, -1)[:-1], np.array(log_probs).reshape(length, -1)[:-1]


def write_rows(folder: Path, rows: Listed[Row], temperature: float) -> None:
    """Write a file of these rows. It appears under its name only when it is complete."""
    import pyarrow.parquet

    numbers, tokens, *arrays = zip(*rows, strict=True)
    nested = [[list(array_LK) for array_LK in column] for column in arrays]
    metadata = {_KEY: json.dumps({"temperature": temperature})}
    table = pyarrow.table(dict(zip(COLUMNS, (numbers, tokens, *nested), strict=True)), metadata=metadata)
    path = folder / f"sequence-{numbers[0]:09d}.parquet"
    group = max(1, _GROUP_BYTES // (arrays[0][0].size * 8))
    partial = path.with_suffix(".writing")
    try:
        pyarrow.parquet.write_table(table, partial, row_group_size=group, compression="zstd")
    except OSError as error:  # PyArrow's error of a full disk names no path
        raise OSError(error.errno, error.strerror, str(folder)) from error
    os.replace(partial, path)


def _with_schema(table: Any) -> Any:
    """Returns `COLUMNS` of a table, cast to the types that this module writes."""
    import pyarrow

    lists = [pyarrow.list_(pyarrow.list_(kind)) for kind in (pyarrow.int32(), pyarrow.float32())]
    types = (pyarrow.int64(), pyarrow.list_(pyarrow.int32()), *lists)
    return table.select(COLUMNS).cast(pyarrow.schema(zip(COLUMNS, types, strict=True)))
