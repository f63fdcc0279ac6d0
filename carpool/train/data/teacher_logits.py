"""Files of what a teacher says of each token: Parquet, a row for each sequence (docs/reference/distillation.md).

    sequence    int64                     its number in `carpool.train.data.sequences`
    input_ids   list<int32>               (L,) its tokens, by which data, tokenizer and packing are known again
    token_ids   list<list<int32>>         (L, K) words that may come after each token, distinct
    log_probs   list<list<float>>         (L, K) their log-probabilities, -inf: impossible

Rows may be in any order, in any number of files; row groups of about 1 MiB are quick to read one by one, as shuffled
steps do. The schema's metadata may say under `carpool`, as JSON, the `temperature` of the probabilities, otherwise 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Listed
from pathlib import Path

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
# As `COLUMNS`.
Row = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]


def check_teacher(folder: Path, tokenizer: Tokenizer, sequences: Sequences | None, words: int | None) -> None:
    """Raise ValueError if the teacher in that folder has another number of words than its student, or a tokenizer that
    reads other text in the first sequences. None: that is not known."""
    theirs = read_config(folder).get_text_config(decoder=True).vocab_size
    if words not in (None, theirs):
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
            there, here = text[place : place + 40], ours[place : place + 40]
            raise ValueError(
                f"the teacher in {folder} has another tokenizer than the data ({tokenizer.name}): tokens of sequence "
                f"{number} are {there!r} to it, and {here!r} to the model; take a teacher with the model's tokenizer"
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
        paths, sizes = sorted(self.folder.glob("*.parquet")), set[int]()
        self._files = [pyarrow.parquet.ParquetFile(path, memory_map=True) for path in paths]
        # By sequence: the file, the row group, and the row in it.
        self._places: dict[int, tuple[int, int, int]] = {}
        for number, (path, file) in enumerate(zip(paths, self._files, strict=True)):
            if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                raise ValueError(f"{path} has no column {missing[0]}; it takes {', '.join(COLUMNS)}")
            said = json.loads((file.schema_arrow.metadata or {}).get(_KEY, b"{}")).get("temperature", 1.0)
            if said != distillation.temperature:
                raise ValueError(
                    f"{path} has probabilities of the temperature {said:g}, but distillation.temperature = "
                    f"{distillation.temperature:g}: set that to {said:g}, or write the file again"
                )
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            rows = [(number, group, row) for group, size in enumerate(groups) for row in range(size)]
            self._places |= zip(file.read(["sequence"])["sequence"].to_pylist(), rows, strict=True)
            sizes |= {self._read(place)[0].shape[1] for place in rows[:1]}
        self.top_k = distillation.top_k or min(sizes, default=0)
        if sizes and self.top_k > min(sizes):
            raise ValueError(
                f"distillation.top_k = {self.top_k}, but files in {self.folder} have {min(sizes)} words of each token: "
                "set it to that at most"
            )

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._places

    def check(self, sequences: Sequences, rank: int = 0, ranks: int = 1) -> None:
        """Raise ValueError unless there is a row with the same tokens for each sequence. Each of several ranks compares
        those of some row groups."""
        missing = [number for number in range(len(sequences)) if number not in self]
        if missing or len(self._places) > len(sequences):
            what = f"no row for {len(missing):,}, such as sequence {missing[0]}" if missing else "more rows"
            raise ValueError(
                f"distillation.logits = {self.folder}: the data have {len(sequences):,} sequences, and the files have "
                f"{what}: write them with `carpool teach TEACHER` and the settings of this run"
            )
        for file in self._files:
            own = list(range(rank, file.num_row_groups, ranks))
            for batch in file.iter_batches(row_groups=own, columns=["sequence", "input_ids"]):
                for number, ids in zip(batch["sequence"].to_pylist(), batch["input_ids"], strict=True):
                    if not np.array_equal(sequences[number].ids, ids.values.to_numpy()):
                        raise ValueError(
                            f"distillation.logits = {self.folder}: the row of sequence {number} has other tokens than "
                            "the data: it was written with another tokenizer, other data, or another "
                            "data.sequence_length or packing; write it again with the settings of this run"
                        )

    def __getitem__(self, sequence: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(L, K) words, and their log-probabilities.

        Raises:
            ValueError: they cannot be those of a token."""
        ids_LK, log_LK = self._read(self._places[sequence])
        if self.top_k < ids_LK.shape[1]:
            order_LK = np.argsort(-log_LK, axis=1, kind="stable")[:, : self.top_k]
            ids_LK, log_LK = np.take_along_axis(ids_LK, order_LK, 1), np.take_along_axis(log_LK, order_LK, 1)
        wrong = ids_LK[(ids_LK < 0) | (ids_LK >= (self._words or 2**31))]
        why = f"has word {wrong[0]} for a token, of {self._words:,}" if len(wrong) else ""
        if (np.diff(np.sort(ids_LK, axis=1), axis=1) == 0).any():
            why = why or "has a word twice for one token"
        if not np.exp(log_LK).sum(1).max() <= 1 + _ROUNDING:
            why = "has probabilities that sum up to more than 1, or are no numbers"
        if why:
            raise ValueError(f"distillation.logits = {self.folder}: sequence {sequence} {why}")
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
        table = self._files[number].read_row_group(group, columns=list(COLUMNS[1:]))
        tokens, *both = (table[name][row].values for name in COLUMNS[1:])
        ids_LK, log_LK = (np.asarray(one.flatten()).reshape(len(tokens), -1) for one in both)
        return ids_LK.astype(np.int32), log_LK.astype(np.float32)


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
    pyarrow.parquet.write_table(table, partial, row_group_size=group, compression="zstd")
    os.replace(partial, path)
