"""Data that is read while it is trained on (`data.streaming`): nothing is tokenized before a run, nothing is cached.

Lanes. The places of the endless stream of sequences are dealt out to V lanes (`data.stream_lanes`), place p to lane p
mod V. A lane reads every source by itself: of `datasets`' IterableDataset over its files, the share v of V (whole files
where their number divides, otherwise every V-th row). A rank reads the lanes that its places are of:

    V = 4, steps of 8 places      lanes of a step   0 1 2 3 0 1 2 3
    4 ranks   rank 1 has places 1 5, lane 1         2 ranks   rank 1 has places 1 3 5 7, lanes 1 and 3

What a lane gives depends on V and not on the ranks, so that a step is the same on any number of them. Of examples that
stay apart, each rank reads all lanes, because the mean loss of a step needs the number of learned tokens of all ranks.

Blocks. A lane reads a source block by block, `data.stream_buffer` sequences each: rows are tokenized and packed as
those of a file (`carpool.train.data.sequences`), and the block's sequences are shuffled. In a stream, what is left of a
block begins the next one. A lane's first block is shorter, by the number of the lane, so that not all lanes read in one
step.

Mixtures. Which source a place has says a fixed pattern of 10,000 places with the sources' weights, as in
`carpool.train.data.mixture`. Each V places are permuted by themselves: weights of 1 and 1 would otherwise give every
other lane one source alone, and what the other lanes have of that source would never be seen. A source that ends begins
again; each time its files come in another order.

Position. Of each lane and source: the state of the IterableDataset at the begin of its block, what was left then, and
how many of the block's sequences were handed out. A resumed run reads the block again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from carpool.train.config.schema import DataSection
from carpool.train.config.schema_data import DataSet
from carpool.train.data.corpus import Corpus, Marks, data_sets, make_encoder
from carpool.train.data.examples import Encoder
from carpool.train.data.formats import fields_of
from carpool.train.data.loader import TrainLoader
from carpool.train.data.mixture import evenly, sequences_of, shares_of
from carpool.train.data.order import permutation
from carpool.train.data.readers import Source, read_rows
from carpool.train.data.rows import Row
from carpool.train.data.sequences import IGNORED, Ids, NothingToLearn, Sequence, Sequences
from carpool.train.data.sources import describe_sources
from carpool.train.data.tokenizer import Tokenizer

PATTERN = 10_000
_GROUP_BYTES = 1 << 18


class _Opened(NamedTuple):
    """A source: its files, and what makes examples of its rows."""

    one: DataSet
    sources: list[Source]
    form: str
    encoder: Encoder


class Streams:
    """What a streamed run trains on. It has no end, hence no epochs.

    Args:
        multiple: of which lengths of batches are, where they are not L.

    Raises:
        ValueError: as `carpool.train.data.corpus.prepare`, as far as first rows tell.
    """

    lengths = None
    per_epoch = sys.maxsize

    def __init__(self, data: DataSection, tokenizer: Tokenizer, model_path: str | None, multiple: int = 8) -> None:
        self.data, self.multiple, self.length = data, multiple, data.sequence_length
        self.opened = []
        for one in data_sets(data)[0]:
            encoder, form, sources = make_encoder(one, tokenizer, model_path)
            self.opened.append(_Opened(one, sources, form, encoder))
        self.padded = any(each.encoder.marks for each in self.opened)
        self.packed = self.padded and data.packing != "off"
        if self.padded and data.too_long == "refuse":
            raise ValueError(
                'data.too_long = "refuse" with data.streaming: examples are read while they are trained on, and one of '
                "more than data.sequence_length tokens would end the run there; set data.too_long to truncate (their "
                "end is not learned) or split (their parts do not see each other)"
            )
        self.names = tuple(each.one.name for each in self.opened) if data.sources is not None else ()
        shares = [1] if data.sources is None else shares_of([PATTERN] * len(data.sources), data.sources, PATTERN)
        for each, share, source in zip(self.opened, shares, data.sources or (), strict=False):
            if share == 0 and source.weight != 0:
                raise ValueError(f"data.sources: {each.one.name} has less than 1/{PATTERN:,} of the weight: raise it")
        self.pattern = evenly(shares)
        parts = [
            [each.form, each.encoder.fingerprint, [(name.rsplit("/", 1)[-1], size) for name, size, _ in signature]]
            for each in self.opened
            for signature in [[part for source in each.sources for part in source.signature()]]
        ]
        settings = [data.packing, data.too_long, data.stream_buffer, shares]
        self.fingerprint = hashlib.sha256(repr([parts, settings]).encode()).hexdigest()

    def source_at(self, place: int, lanes: int) -> int:
        """The number of the source at this place of the endless stream."""
        if len(self.opened) == 1:
            return 0
        turn, lane = divmod(place, lanes)
        return int(self.pattern[(turn * lanes + int(permutation(lanes, 0, turn)[lane])) % len(self.pattern)])

    def describe(self) -> str:
        """What is read, for people."""
        files = sum(len(each.sources) for each in self.opened)
        return f"streamed from {files:,} files in up to {self.data.stream_lanes} lanes"

    def numbers(self) -> dict[str, Any]:
        """The same for programs."""
        counts = np.bincount(self.pattern, minlength=len(self.opened)) / len(self.pattern)
        shares = {name: round(float(count), 6) for name, count in zip(self.names, counts, strict=False)}
        files = {each.one.name: len(each.sources) for each in self.opened}
        return {"streamed": True, "files": files, "shares": shares, "source": self.source}

    @property
    def source(self) -> str:
        """For people: where the data comes from."""
        return "; ".join(describe_sources(each.one.data.train) for each in self.opened)


class Lane:
    """The sequences of one lane, endless.

    Args:
        lane, lanes: v and V.
        state: to go on from, of `state`; None: the start.
    """

    def __init__(self, streams: Streams, lane: int, lanes: int, seed: int, state: dict[str, Any] | None = None) -> None:
        self._streams, self._lane, self._lanes = streams, lane, lanes
        self._count = 0 if state is None else int(state["count"])
        self._sources = [
            _Blocks(streams, i, lane, lanes, seed, None if state is None else state["sources"][i])
            for i in range(len(streams.opened))
        ]

    def __next__(self) -> Sequence:
        place = self._count * self._lanes + self._lane
        self._count += 1
        return next(self._sources[self._streams.source_at(place, self._lanes)])

    def check(self) -> None:
        """Raise ValueError if it gets no row of a source, which it may need only later."""
        for number, blocks in enumerate(self._sources):
            if number in self._streams.pattern:
                blocks.check()

    def state(self) -> dict[str, Any]:
        """Plain numbers and text."""
        return {"count": self._count, "sources": [blocks.state() for blocks in self._sources]}


class _Blocks:
    """The sequences of one source in one lane, block by block."""

    def __init__(
        self, streams: Streams, number: int, lane: int, lanes: int, seed: int, state: dict[str, Any] | None
    ) -> None:
        self._streams, self._opened = streams, streams.opened[number]
        self._lane, self._lanes, self._seed = lane, lanes, seed * len(streams.opened) + number
        # Where the block at hand begins, and how many of its sequences were handed out.
        self._at: dict[str, Any] = {"pass": 0, "block": 0, "rows": None, "left": []}
        self._used = 0
        self._next: dict[str, Any] | None = None
        self._block: list[Sequence] | None = None
        if state is not None:
            self._at, self._used = state["at"], int(state["used"])
        self._fruitful = int(self._at["pass"])
        self._rows: Iterator[Row] | None = None
        self._dataset: Any = None
        self._pass, self._empty = 0, True

    def state(self) -> dict[str, Any]:
        return {"at": self._at, "used": self._used}

    def __next__(self) -> Sequence:
        while self._block is None or self._used >= len(self._block):
            if self._block is not None:
                assert self._next is not None
                self._at, self._used = self._next, 0
            self._block, self._next = self._read(self._at)
        self._used += 1
        return self._block[self._used - 1]

    def check(self) -> None:
        """Raise ValueError if there is no row with text. Nothing can be read after it."""
        if self._rows is None:
            self._open(0, None)
            self._group(1)

    def _read(self, at: dict[str, Any]) -> tuple[list[Sequence], dict[str, Any]]:
        """The block that begins here, and where the next one does."""
        data, encoder, length = self._opened.one.data, self._opened.encoder, self._streams.length
        count = self._streams.data.stream_buffer
        if at["block"] == 0:
            count = max(1, count * (self._lane + 1) // self._lanes)
        left = np.asarray(at["left"], dtype=np.uint32)
        tokens, learned, ends = [left], [np.ones(len(left), dtype=bool)], []
        total, need = len(left), count * (length - 1) + 1
        if self._rows is None:
            self._open(at["pass"], at["rows"])
        while total < need:
            for ids, marks in encoder.encode(self._group(min(_GROUP_BYTES, need - total))):
                tokens.append(ids)
                learned.append(np.ones(len(ids), dtype=bool) if marks is None else marks)
                total += len(ids)
                ends.append(total)
        array = np.concatenate(tokens)
        all_marks = Marks(np.concatenate(learned), np.array(ends, dtype=np.int64)) if encoder.marks else None
        corpus = Corpus(array, array[:0], len(ends), 0, "", "", all_marks, of=self._opened.one)
        after = {"pass": self._pass, "block": at["block"] + 1, "rows": self._dataset.state_dict(), "left": []}
        try:
            found = sequences_of(corpus, data, self._streams.multiple)
        except NothingToLearn:
            if self._pass > self._fruitful + 1:  # nor has all that was read of the pass between
                raise
            return [], after
        self._fruitful = self._pass
        order = permutation(len(found), self._seed, at["block"] * self._lanes + self._lane)
        if not encoder.marks:
            after["left"] = array[len(found) * (length - 1) :].tolist()
        return [found[int(i)] for i in order], after

    def _group(self, least: int) -> list[Row]:
        """The next rows, of at least so many bytes, because tokenizers are faster so; after the source's end, from its
        begin."""
        assert self._rows is not None
        rows: list[Row] = []
        size = 0
        while size < least:
            row = next(self._rows, None)
            if row is not None:
                if one := self._opened.encoder.size(row):
                    rows.append(row)
                    size += one
                continue
            if rows:
                break
            if self._empty:
                raise ValueError(
                    f"{self._opened.one.key}: lane {self._lane} of {self._lanes} gets no row with text: lower "
                    "data.stream_lanes, or leave out data.streaming"
                )
            self._open(self._pass + 1, None)
        self._empty = self._empty and not rows
        return rows

    def _open(self, number: int, state: dict[str, Any] | None) -> None:
        """Read the source for the `number`-th time, from a state of the IterableDataset on."""
        import datasets
        from datasets.distributed import split_dataset_by_node

        one, sources = self._opened.one, self._opened.sources
        order = permutation(len(sources), self._seed, number)
        wanted = fields_of(one.data, self._opened.form)

        def rows(files: list[Source]) -> Iterator[dict[str, Row]]:
            for file in files:
                yield from ({"row": row} for row in read_rows([file], wanted, one.splits))

        files = [sources[int(i)] for i in order]
        dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": files})
        self._dataset = split_dataset_by_node(dataset, self._lane, self._lanes)
        if state is not None:
            self._dataset.load_state_dict(state)
        # Whether no row of this pass was used; one that is resumed has ended a block with some.
        self._pass, self._empty = number, state is None
        self._rows = (found["row"] for found in self._dataset)


def lanes_for(wanted: int, step: int) -> int:
    """How many lanes a run begins with: the largest divisor of a step's sequences that is at most this."""
    return max(lanes for lanes in range(1, min(wanted, step) + 1) if step % lanes == 0)


class StreamLoader(TrainLoader):
    """The steps of a run on a stream. `options`: as `TrainLoader`.

    Raises:
        ValueError: rows that cannot be used, when they are read.
    """

    def __init__(self, streams: Streams, **options: Any) -> None:
        super().__init__(cast(Sequences, streams), **options)
        self._streams = streams
        self._lanes = lanes_for(streams.data.stream_lanes, self.global_batch_size)
        self._open: dict[int, Lane] = {}
        self._saved: dict[str, Any] = {}

    def _draw(self, places: NDArray[np.int64]) -> tuple[Sequences, NDArray[np.int64]]:
        lanes, streams = places % self._lanes, self._streams
        # Without marks all sequences are alike, and only this rank's are read, with those between them in their lanes.
        some = not streams.padded and len(places) % self._lanes == 0
        needed = set(lanes[self._slots_GN.ravel()] if some else lanes)
        found = {i: next(self._lane(int(lane))) for i, lane in enumerate(lanes) if lane in needed}
        sources = np.array([streams.source_at(place, self._lanes) for place in places.tolist()])
        return cast(Sequences, _Step(streams, found, sources)), np.arange(len(places))

    def _lane(self, number: int) -> Lane:
        if number not in self._open:
            saved = self._saved.get(str(number))
            self._open[number] = Lane(self._streams, number, self._lanes, self._seed, saved)
        return self._open[number]

    def check(self) -> None:
        """Raise ValueError for rows of the first step that cannot be used, or a lane without rows. Nothing can be read
        after it."""
        next(self)
        for lane in self._open.values():
            lane.check()

    def state_dict(self) -> dict[str, Any]:
        """The position. `lanes` has those that this rank reads; a checkpoint needs those of all ranks."""
        lanes = {**self._saved, **{str(number): lane.state() for number, lane in self._open.items()}}
        return {**super().state_dict(), "num_lanes": self._lanes, "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._lanes, self._saved, self._open = int(state["num_lanes"]), dict(state["lanes"]), {}


class _Step:
    """The sequences of a step by their places in it, as far as they were read: those of a stream without marks are
    alike.

    Args:
        found: those that were read.
        sources: (places,) the number of each one's source.
    """

    def __init__(self, streams: Streams, found: dict[int, Sequence], sources: Ids) -> None:
        self._streams, self._found, self._sources = streams, found, sources
        self.padded, self.packed = streams.padded, streams.packed
        starts = [int((one.positions == 0).sum()) for one in found.values() if one.positions is not None]
        # Rounded up, so that few shapes occur; padding is a document, too.
        self.documents = -(-(max(starts) + 1) // 16) * 16 if starts else 1

    def __getitem__(self, index: int) -> Sequence:
        return self._found[index]

    def targets(self, indices: Ids) -> int:
        if not self.padded:
            return self.tokens(indices)
        return sum(int((self._found[int(i)].labels[1:] != IGNORED).sum()) for i in indices)

    def tokens(self, indices: Ids) -> int:
        return sum(len(self._found[int(i)].ids) if self.padded else self._streams.length - 1 for i in indices)

    def source_tokens(self, indices: Ids) -> dict[str, int]:
        of = self._sources[indices]
        return {name: self.tokens(indices[of == number]) for number, name in enumerate(self._streams.names)}

    def batch_length(self, indices: Ids) -> int:
        data, length, multiple = self._streams.data, self._streams.length, self._streams.multiple
        if not self.padded or self.packed or data.pad_to != "longest":
            return length
        return min(length, -(-max(len(self._found[int(i)].ids) for i in indices) // multiple) * multiple)
