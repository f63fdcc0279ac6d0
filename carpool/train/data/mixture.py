"""Several sources of data in fixed shares: sequences of each, mixed evenly.

Shares. An epoch of the mixture has as many sequences as all sources together, and source i has k_i of them: its share
by `weight`, to the nearest sequence. With `epochs` instead, k_i is that many times the source's own sequences. Without
either, each source is read once in an epoch.

Order. The j-th of a source's k sequences is at (j + 1/2) / k of the epoch, so that in each stretch, and each step, the
shares are right to about one sequence of each source:

    k = 4, 2        a a b a a b -> places 1/8 3/8 5/8 7/8 and 1/4 3/4:    a b a a b a

Where steps are of similar lengths (`carpool.train.data.order`), only stretches of up to 50 steps have the shares.

Which sequence of the source that is says the source's own endless order, a permutation for each time it is read: every
sequence of it is seen n times before one is seen n + 1 times. All of this follows from the seed and the number of the
epoch, so that the position in the data is one number, on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.config.schema_data import DataSource
from carpool.train.data.corpus import Corpora, Corpus
from carpool.train.data.order import permutation
from carpool.train.data.sequences import Examples, Ids, Sequence, Sequences, Stream


class Mixture:
    """Sequences of several sources, numbered one source after the other.

    Args:
        parts: the sequences of each source, by its name.
        sources: their settings.

    Raises:
        ValueError: a source has no sequence, or so small a share that an epoch has none of it.
    """

    def __init__(self, parts: dict[str, Sequences], sources: Listed[DataSource]) -> None:
        self._parts, self.names = list(parts.values()), tuple(parts)
        self._first = np.cumsum([0, *map(len, self._parts)])
        self._shares = shares_of([len(part) for part in self._parts], sources)
        for name, part, share, source in zip(self.names, self._parts, self._shares, sources, strict=True):
            if source.weight != 0 and (share == 0 or not len(part)):
                raise ValueError(
                    f"data.sources: an epoch of the mixture has {sum(self._shares):,} sequences, of which {name} gets "
                    f"none (it has {part.describe()}): raise its weight, or give more data"
                )
        self.per_epoch = sum(self._shares)
        self.length, self.packed = self._parts[0].length, any(part.packed for part in self._parts)
        self.padded = any(part.padded for part in self._parts)
        self.documents = max(part.documents for part in self._parts)
        lengths = [part.lengths for part in self._parts if part.lengths is not None]
        self.lengths: Ids | None = np.concatenate(lengths) if lengths else None
        identity = [part.fingerprint for part in self._parts], self._shares
        self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()

    def order(self, seed: int, epoch: int) -> Ids:
        """All sequences of an epoch, in order."""
        drawn = [self._drawn(i, seed, epoch) for i in range(len(self._parts))]
        return np.concatenate(drawn)[np.argsort(_places(self._shares), kind="stable")]

    def _drawn(self, i: int, seed: int, epoch: int) -> Ids:
        """What an epoch has of source i."""
        size, share, found = len(self._parts[i]), self._shares[i], [np.empty(0, dtype=np.int64)]
        start, end = epoch * share, (epoch + 1) * share
        for time in range(start // size, -(-end // size)) if share else ():
            order = permutation(size, seed, time * len(self._parts) + i)
            found.append(order[max(0, start - time * size) : end - time * size])
        return np.concatenate(found) + self._first[i]

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Sequence:
        i = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._parts[i][index - int(self._first[i])]

    def _by_part(self, indices: Ids) -> Iterator[tuple[str, Sequences, Ids]]:
        """Which of these are each source's, by its own numbers."""
        for name, part, first in zip(self.names, self._parts, self._first, strict=False):
            own = indices[(indices >= first) & (indices < first + len(part))] - first
            if len(own):
                yield name, part, own

    def targets(self, indices: Ids) -> int:
        return sum(part.targets(own) for _, part, own in self._by_part(indices))

    def tokens(self, indices: Ids) -> int:
        return sum(self.source_tokens(indices).values())

    def source_tokens(self, indices: Ids) -> dict[str, int]:
        found = dict.fromkeys(self.names, 0)
        return found | {name: part.tokens(own) for name, part, own in self._by_part(indices)}

    def batch_length(self, indices: Ids) -> int:
        return max(part.batch_length(own) for _, part, own in self._by_part(indices))

    def describe(self) -> str:
        parts = [
            f"{name}: {part.describe()}, {share / self.per_epoch:.1%} of the mixture "
            f"({share / max(1, len(part)):.2f} epochs)"
            for name, part, share in zip(self.names, self._parts, self._shares, strict=True)
        ]
        return f"{self.per_epoch:,} sequences in an epoch of the mixture: " + "; ".join(parts)

    def numbers(self) -> dict[str, Any]:
        shares = {name: round(share / self.per_epoch, 6) for name, share in zip(self.names, self._shares, strict=True)}
        of_each = {name: part.numbers() for name, part in zip(self.names, self._parts, strict=True)}
        return {"sequences": len(self), "sequences_per_epoch": self.per_epoch, "shares": shares, "sources": of_each}


def _places(shares: Listed[int]) -> NDArray[np.float64]:
    """Where in an epoch the sequences of each source are, one source after the other."""
    return np.concatenate([(np.arange(share) + 0.5) / max(1, share) for share in shares])


def evenly(shares: Listed[int]) -> Ids:
    """The number of the source at each place of an epoch that has so many sequences of each."""
    return np.repeat(np.arange(len(shares)), shares)[np.argsort(_places(shares), kind="stable")]


def shares_of(sizes: Listed[int], sources: Listed[DataSource], total: int | None = None) -> list[int]:
    """Sequences of each source in an epoch of the mixture. `total`: of all; None: as many as the sources have."""
    if all(source.weight is None for source in sources):
        return [round(size * (source.epochs or 1.0)) for size, source in zip(sizes, sources, strict=True)]
    weights = [source.weight or 0.0 for source in sources]
    total = total or sum(size for size, weight in zip(sizes, weights, strict=True) if weight)
    exact = [total * weight / (sum(weights) or 1.0) for weight in weights]
    shares = [int(one) for one in exact]
    # What is left over goes to the largest remainders.
    for i in sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
        shares[i] += 1
    return shares


def train_sequences(corpora: Corpora, data: DataSection, multiple: int = 8) -> Sequences:
    """What a run trains on. `multiple`, ValueError: as `Examples`."""
    parts = [sequences_of(corpus, data, multiple) for corpus in corpora.sources]
    if data.sources is None:
        return parts[0]
    return Mixture({one.name: part for one, part in zip(data.train_sets(), parts, strict=True)}, data.sources)


def eval_sequences(corpora: Corpora, data: DataSection, multiple: int = 8) -> dict[str, Sequences]:
    """What is held out, by name: as `data.eval` names it, otherwise of each source. `multiple`, ValueError: as
    `Examples`."""
    if corpora.held_out or not corpora.sources:
        return {
            corpus.of.name: sequences_of(corpus, data, multiple, partial=True)
            for corpus in corpora.held_out
            if corpus.of is not None
        }
    named = {"eval": corpora.sources[0]}
    if data.sources is not None:
        named = {one.name: corpus for one, corpus in zip(data.train_sets(), corpora.sources, strict=True)}
    found: dict[str, Sequences] = {}
    for name, corpus in named.items():
        if corpus.eval_marks is not None and len(corpus.eval_marks.ends):
            found[name] = Examples(corpus, data, held_out=True, multiple=multiple)
        else:
            found[name] = Stream(corpus.eval, data.sequence_length, partial=True)
    return found


def sequences_of(corpus: Corpus, data: DataSection, multiple: int = 8, partial: bool = False) -> Sequences:
    """Of one source. `partial`: is a last sequence of fewer tokens of a stream one, too? ValueError: as `Examples`."""
    if corpus.train_marks is not None:
        return Examples(corpus, data, multiple=multiple)
    return Stream(corpus.train, data.sequence_length, corpus.fingerprint, partial=partial)
