"""What loaders draw from: sequences of a fixed length, by number.

A stream. Documents lie end to end in the array, an EOS after each, and sequence i of length L is tokens
`i(L-1) .. i(L-1)+L-1`: neighbours share one token. `labels` are those L tokens too, because transformers' models shift
labels themselves (position t is trained to predict label t+1, and the last position nothing). Thanks to the shared
token every token of the array but the first is predicted exactly once per epoch:

    tokens 0 1 2 3 4 5 6, L = 4:   [0 1 2 3]  predicts 1 2 3
                                   [3 4 5 6]  predicts 4 5 6

Packed examples. A sequence holds whole examples, each with positions of its own, by
which attention keeps them apart. Labels are -100 where nothing is learned, and at the first token of each:

    input_ids      a b c d e | f g h | . .        "." is padding
    labels         . . . d e | . g h | . .        learned: d e g h
    position_ids   0 1 2 3 4 | 0 1 2 | 0 1

Packing. Examples become pieces of at most a sequence's length, and pieces become sequences.

    lengths 5 9 3 2 4, sequences of 9      [9] [5 4] [3 2]         the longest first, each where it fits best

That is best-fit decreasing, whose sequences are at most 11/9 of the fewest possible, and with many short pieces nearly
none is left over. It depends on lengths alone. No example is cut in order to fill a sequence.

A longer example than a sequence is refused, cut off or split, as `data.too_long` says. Pieces of a split one share a
token, so that each token but the first is predicted once:

    tokens 0 1 2 3 4 5 6, sequences of 4:  [0 1 2 3] [3 4 5 6]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.data.corpus import Corpus, Marks
from carpool.train.data.order import permutation

TooLong = Literal["refuse", "truncate", "split"]


class NothingToLearn(ValueError):
    """No example has a token to learn."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Stretches of the array of tokens that are documents in a sequence.

    Attributes:
        start, length, targets: (pieces,) int64: the first token, how many, and how many of them are predicted.
        examples: of the corpus.
        too_long: how many of them were longer than a sequence.
        cut_tokens: learned tokens that were cut off.
        without: pieces that had nothing to learn, and were left out.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    targets: NDArray[np.int64]
    examples: int
    too_long: int
    cut_tokens: int
    without: int


def cut(marks: Marks, length: int, too_long: TooLong, key: str) -> Pieces:
    """The pieces of all examples, in order.

    Args:
        length: L, tokens of a sequence.
        too_long: what becomes of examples of more.
        key: where the data comes from, such as "data.train", for errors.

    Raises:
        ValueError: an example is too long and that is refused.
        NothingToLearn: no example has a token to learn.
    """
    end = np.asarray(marks.ends)
    start = np.concatenate([np.zeros(1, dtype=np.int64), end[:-1]]) if len(end) else end
    sizes = end - start
    long = sizes > length
    if long.any() and too_long == "refuse":
        raise ValueError(
            f"{key}: {int(long.sum()):,} of {len(end):,} examples are longer than data.sequence_length = {length}; the "
            f"longest has {int(sizes.max()):,} tokens: raise data.sequence_length, or set data.too_long to truncate "
            "(their end is not learned) or split (their parts do not see each other)"
        )
    all_targets = _targets(marks.learned, start, sizes).sum()
    if too_long == "split":
        step = length - 1
        # Pieces of an example: as many as its predictions need.
        counts = np.maximum(1, -(-(sizes - 1) // step))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        end = np.repeat(end, counts)
        start = np.repeat(start, counts) + number * step
        sizes = end - start
    sizes = np.minimum(sizes, length)
    targets = _targets(marks.learned, start, sizes)
    learns = targets > 0
    if not learns.any():
        raise NothingToLearn(
            f"{key}: none of its {len(marks.ends):,} examples has a token to learn within data.sequence_length = "
            f"{length}"
        )
    return Pieces(
        start[learns],
        sizes[learns],
        targets[learns],
        examples=len(marks.ends),
        too_long=int(long.sum()),
        cut_tokens=int(all_targets - targets.sum()),
        without=int((~learns).sum()),
    )


def _targets(learned: NDArray[np.bool_], start: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Learned tokens of each stretch but its first token, which nothing predicts."""
    if not len(start):
        return sizes
    several = sizes > 1
    # Sums from each place to the next, of which every other one is wanted; the last one goes to the end.
    places = np.stack([start + several, start + sizes], axis=1).ravel()
    sums = np.add.reduceat(learned, places[:-1] if places[-1] == len(learned) else places, dtype=np.int64)
    return np.where(several, sums[::2], 0)


def best_fit(lengths: NDArray[np.int64], size: int) -> list[list[int]]:
    """Which pieces, by number, are in which sequence of at most `size` tokens."""
    sequences: list[list[int]] = []
    size = min(size, int(lengths.sum()))  # what follows takes memory in proportion
    # Open sequences by the room that is left in them, and bit r is set where there is one with room r.
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            sequences[sequence].append(piece)
        else:
            room, sequence = size, len(sequences)
            sequences.append([piece])
        with_room[room - length].append(sequence)
        rooms |= 1 << (room - length)
    return sequences


IGNORED = -100
Ids = NDArray[np.int64]


class Sequence(NamedTuple):
    """At most L tokens, their labels, and their positions in their documents; None: there is one document."""

    ids: Ids
    labels: Ids
    positions: Ids | None


class Sequences(Protocol):
    """Sequences by number, the same on every rank.

    Attributes:
        length: L; a sequence may have fewer tokens.
        packed: do sequences have positions?
        documents: the most that one sequence has, padding included.
        padded: do they lack tokens in training too?
        lengths: tokens of each, by which those of a step are to be similar; None: they need not be.
        fingerprint: equal for equal sequences.
        per_epoch: how many an epoch has.
        names: the sources of a mixture; of one source alone, none.
    """

    length: int
    packed: bool
    documents: int
    padded: bool
    lengths: Ids | None
    fingerprint: str
    names: tuple[str, ...]

    @property
    def per_epoch(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence: ...

    def order(self, seed: int, epoch: int) -> Ids:
        """The sequences of an epoch."""

    def targets(self, indices: Ids) -> int:
        """How many tokens these sequences predict."""

    def source_tokens(self, indices: Ids) -> dict[str, int]:
        """Of a mixture, how many tokens of each source."""

    def tokens(self, indices: Ids) -> int:
        """How many tokens these sequences have; of a stream, that are not those of another too."""

    def batch_length(self, indices: Ids) -> int:
        """How long a batch of these is."""

    def describe(self) -> str:
        """How many there are, for people."""

    def numbers(self) -> dict[str, Any]:
        """The same for programs."""


class _OneSource:
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def per_epoch(self) -> int:
        return len(self)

    def order(self, seed: int, epoch: int) -> Ids:
        return permutation(len(self), seed, epoch)

    def source_tokens(self, indices: Ids) -> dict[str, int]:
        return {}


class Stream(_OneSource):
    """Sequences of one array of tokens.

    Args:
        tokens: one dimension.
        length: L.
        partial: is a last sequence of fewer than L tokens one too?
    """

    packed = padded = False
    documents = 1
    lengths: Ids | None = None

    def __init__(self, tokens: NDArray[Any], length: int, fingerprint: str = "", *, partial: bool = False) -> None:
        self._array, self.length, self.fingerprint = tokens, length, fingerprint
        predicted = max(0, len(tokens) - 1)
        self._count = -(-predicted // (length - 1)) if partial else predicted // (length - 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sequence:
        start = index * (self.length - 1)
        ids = self._array[start : start + self.length].astype(np.int64)
        return Sequence(ids, ids, None)

    def targets(self, indices: Ids) -> int:
        starts = indices * (self.length - 1)
        return int(np.minimum(self.length - 1, len(self._array) - 1 - starts).sum())

    def tokens(self, indices: Ids) -> int:
        return self.targets(indices)

    def batch_length(self, indices: Ids) -> int:
        return self.length

    def describe(self) -> str:
        return f"{len(self._array):,} tokens, {self._count:,} sequences of data.sequence_length = {self.length}"

    def numbers(self) -> dict[str, Any]:
        return {"sequences": self._count}


class Examples(_OneSource):
    """Sequences of whole examples.

    Args:
        corpus: with marks.
        data: `sequence_length`, `packing`, `pad_to`, `group_by_length` and `too_long` count.
        held_out: of the held-out examples, else of those to train on.
        multiple: of which lengths of batches are, where they are not L.

    Raises:
        ValueError: as `carpool.train.data.sequences.cut`.
    """

    padded = True

    def __init__(self, corpus: Corpus, data: DataSection, *, held_out: bool = False, multiple: int = 8) -> None:
        self._array, marks = (corpus.eval, corpus.eval_marks) if held_out else (corpus.train, corpus.train_marks)
        assert marks is not None
        self._learned, self.length = marks.learned, data.sequence_length
        self._too_long = data.too_long
        self._pieces = pieces = cut(marks, self.length, data.too_long, corpus.key)
        self.packed = data.packing != "off"
        if self.packed:
            groups = best_fit(pieces.length, self.length)
        else:
            groups = [[piece] for piece in range(len(pieces.length))]
        # Sequence i has the pieces of _order from _first[i] to before _first[i + 1].
        self._order = np.array([piece for group in groups for piece in group], dtype=np.int64)
        self._first = np.cumsum([0, *map(len, groups)])
        self.documents = 1 + max(map(len, groups))
        self._targets = np.add.reduceat(pieces.targets[self._order], self._first[:-1])
        self._tokens = np.add.reduceat(pieces.length[self._order], self._first[:-1])
        self.lengths = self._tokens if data.group_by_length and not self.packed else None
        self._multiple = multiple if not self.packed and data.pad_to == "longest" else self.length
        order = "" if self.lengths is None else "-by-length"
        self.fingerprint = f"{corpus.fingerprint}-{data.packing or 'examples'}-{data.too_long}{order}"

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Sequence:
        ids, labels, positions = [], [], []
        for piece in self._order[self._first[index] : self._first[index + 1]]:
            place = slice(self._pieces.start[piece], self._pieces.start[piece] + self._pieces.length[piece])
            tokens = self._array[place].astype(np.int64)
            goals = np.where(self._learned[place], tokens, IGNORED)
            goals[0] = IGNORED
            ids.append(tokens)
            labels.append(goals)
            positions.append(np.arange(len(tokens)))
        return Sequence(np.concatenate(ids), np.concatenate(labels), np.concatenate(positions) if self.packed else None)

    def targets(self, indices: Ids) -> int:
        return int(self._targets[indices].sum())

    def tokens(self, indices: Ids) -> int:
        return int(self._tokens[indices].sum())

    def batch_length(self, indices: Ids) -> int:
        return min(self.length, -(-int(self._tokens[indices].max()) // self._multiple) * self._multiple)

    def describe(self) -> str:
        pieces, tokens = self._pieces, int(self._tokens.sum())
        parts = [
            f"{pieces.examples:,} examples, {tokens:,} tokens, {int(self._targets.sum()):,} of them learned",
            f"{len(self):,} sequences of data.sequence_length = {self.length}, "
            f"{tokens / len(self) / self.length:.0%} full",
        ]
        if pieces.too_long:
            done = "truncated" if self._too_long == "truncate" else "split"
            lost = f" ({pieces.cut_tokens:,} tokens that were to be learned are lost)" if pieces.cut_tokens else ""
            parts.append(f"{pieces.too_long:,} examples were too long and {done}{lost}")
        if pieces.without:
            what = "parts of examples" if self._too_long == "split" else "examples"
            parts.append(f"{pieces.without:,} {what} without a token to learn were left out")
        return "; ".join(parts)

    def numbers(self) -> dict[str, Any]:
        pieces = self._pieces
        return {
            "sequences": len(self),
            "examples": pieces.examples,
            "tokens": int(self._tokens.sum()),
            "learned_tokens": int(self._targets.sum()),
            "too_long": pieces.too_long,
            "learned_tokens_lost": pieces.cut_tokens,
            "left_out": pieces.without,
        }
