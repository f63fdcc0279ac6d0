"""Examples become pieces of at most a sequence's length, and pieces become sequences.

    lengths 5 9 3 2 4, sequences of 9      [9] [5 4] [3 2]         the longest first, each where it fits best

That is best-fit decreasing, whose sequences are at most 11/9 of the fewest possible, and with many short pieces nearly
none is left over. It depends on lengths alone. No example is cut in order to fill a sequence.

A longer example than a sequence is refused, cut off or split, as `data.too_long` says. Pieces of a split one share a
token, so that each token but the first is predicted once:

    tokens 0 1 2 3 4 5 6, sequences of 4:  [0 1 2 3] [3 4 5 6]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from carpool.train.data.corpus import Marks

TooLong = Literal["refuse", "truncate", "split"]


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
        ValueError: an example is too long and that is refused, or there is nothing to learn.
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
        raise ValueError(
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
