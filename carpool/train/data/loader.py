"""From sequences to batches, in an order that depends on the seed and on nothing else.

Order. Epoch e visits all sequences in a permutation made from (seed, e), or what a mixture has of each source
(`carpool.train.data.mixture`). The stream of all epochs is endless, and
optimizer step s takes G = micro-batch x accumulation x data-parallel ranks sequences of it, sG .. sG+G-1; of these
rank r of W takes r, r+W, r+2W, ... So the set of sequences in a step is the same for any W with the same G, the
position in the stream is one number, and a checkpoint of it can be continued on another number of ranks. A batch may
straddle two epochs; of a stream of tokens, only those after the last whole sequence are never trained on.

Lengths. With `data.group_by_length` the steps of an epoch have sequences of similar lengths
(`carpool.train.data.order`). A micro-batch is as long as its longest sequence on any rank (`data.pad_to`), so that all
compute the same shapes.

Ranks may take unequal shares (`carpool.parallel.degrees`). A micro-batch of all ranks together is the same then, too;
each takes its share of it, one rank after the other: of 6, with shares 4 and 2, rank 0 has 0 1 2 3 and rank 1 has 4 5.

A batch is a dictionary of (B, L) tensors on the CPU: `input_ids` and `labels`, int64; of examples also `padding`, bool,
true where there is no token of one; of packed ones also `position_ids`, int64, and (B, D) int32
`document_ends`: where the documents of each row end, filled up with L. Padding is a document by itself.

The next step's batches are made while this one computes:

    loader = Prefetch(TrainLoader(...), device)      the same batches in the same order

A thread makes them, one step ahead, in pinned memory, from which they go to a GPU without the host waiting. The state
is of what was handed out: what is ready but was not asked for is made again after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carpool.train.config.schema import Config
from carpool.train.data.order import group_by_length
from carpool.train.data.sequences import IGNORED, Sequence, Sequences

if TYPE_CHECKING:
    from carpool.train.data.teacher_logits import TeacherLogits

Batch = dict[str, Tensor]


class TrainLoader:
    """Endless iterator over optimizer steps: each item is the list of this rank's micro-batches.

    Args:
        sequences: What to train on.
        batch_size: B, sequences of one micro-batch.
        accumulation: Micro-batches of one step.
        dp_rank: This rank among those that see distinct data, 0 .. dp_size-1. Ranks that share their data (tensor
            parallelism) give the same.
        dp_size: The number of those.
        seed: Seed of the order.
        pad_id: Any token.
        shares: Sequences in a micro-batch of each of these ranks. None: `batch_size`.
        alike: All micro-batches of a step are equally long.
        logits: What batches bring of a teacher.

    Attributes:
        targets: tokens that the step handed out last predicts, over all ranks with distinct data.
        tokens: tokens that it has, over the same.
        seen: of a mixture, tokens of each source that were handed out so far, over the same.

    Raises:
        ValueError: there are fewer sequences than one step takes.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        accumulation: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        pad_id: int = 0,
        shares: Listed[int] | None = None,
        alike: bool = False,
        logits: TeacherLogits | None = None,
    ) -> None:
        assert shares is None or len(shares) == dp_size
        self.sequences, self._seed, self._pad_id, self._logits = sequences, seed, pad_id, logits
        self._micro_batch = batch_size * dp_size if shares is None else sum(shares)
        # This rank's places in a step, of each micro-batch.
        all_GN = np.arange(self._micro_batch * accumulation).reshape(accumulation, -1)
        self._slots_GN = all_GN[:, dp_rank::dp_size]
        if shares is not None and len(set(shares)) > 1:
            first = sum(shares[:dp_rank])
            self._slots_GN = all_GN[:, first : first + shares[dp_rank]]
        self.num_sequences = sequences.per_epoch
        self.global_batch_size, self._alike = self._micro_batch * accumulation, alike
        # Of how many sequences each step is a group of similar lengths; 0: of none. A resumed run goes on with it.
        self._group = 0 if sequences.lengths is None else self.global_batch_size
        self.targets = self.tokens = self._position = 0
        self.seen = dict.fromkeys(sequences.names, 0)
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
        if self.num_sequences < self.global_batch_size:
            key = "data.sources" if sequences.names else "data.train"
            raise ValueError(
                f"{key} has {sequences.describe()}, but one step takes {self.global_batch_size} sequences "
                f"(per_device_train_batch_size {batch_size} * gradient_accumulation_steps {accumulation} * {dp_size} "
                "ranks): give more data, or lower one of these"
            )

    @property
    def epoch(self) -> float:
        """Epochs handed out so far; 0.5: half of the data."""
        return self._position / self.num_sequences

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        sequences, indices = self._draw(np.arange(self._position, self._position + self.global_batch_size))
        self._position += self.global_batch_size
        self.targets, self.tokens = sequences.targets(indices), sequences.tokens(indices)
        of_sources = sequences.source_tokens(indices)
        self.seen = {name: seen + of_sources[name] for name, seen in self.seen.items()}
        # N: of all ranks, sequences of each micro-batch.
        all_GN = indices.reshape(-1, self._micro_batch)
        own_GN = indices[self._slots_GN]
        lengths = [sequences.batch_length(indices if self._alike else one_N) for one_N in all_GN]
        batches = [
            make_batch(sequences, [sequences[int(i)] for i in own_N], len(own_N), self._pad_id, length)
            for own_N, length in zip(own_GN, lengths, strict=True)
        ]
        if self._logits is not None:
            for own_N, batch in zip(own_GN, batches, strict=True):
                batch |= self._logits.batch(own_N, batch["input_ids"].shape[1])
        return batches

    def _draw(self, places: NDArray[np.int64]) -> tuple[Sequences, NDArray[np.int64]]:
        """What is at these places of the endless stream: which of which sequences."""
        return self.sequences, np.array([self._at(place) for place in places.tolist()], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """The position, equal on all ranks: plain numbers and text."""
        return {
            "position": self._position,
            "epoch": self._position // self.num_sequences,
            "num_sequences": self.num_sequences,
            "sequence_length": self.sequences.length,
            "seed": self._seed,
            "group": self._group,
            "fingerprint": self.sequences.fingerprint,
            **({"seen": self.seen, "sources": list(self.seen)} if self.seen else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken, also on another number of ranks or with another batch size.

        Raises:
            ValueError: the data, sequence length or seed are not those of the saved position.
        """
        check_same_data(state, self.sequences.fingerprint)
        check_same_order(state, self.sequences.length, self._seed)
        self._position, self._group = int(state["position"]), int(state.get("group", 0))
        # Sources may have been renamed since; a checkpoint keeps the order in `sources` alone.
        seen = state.get("seen", self.seen)
        before = state.get("sources", self.sequences.names)
        self.seen = {name: seen[old] for name, old in zip(self.sequences.names, before, strict=True)}

    def _at(self, place: int) -> int:
        """The sequence at this place of the endless stream."""
        epoch, index = divmod(place, self.num_sequences)
        if self._order[0] != epoch:
            order = self.sequences.order(self._seed, epoch)
            if (lengths := self.sequences.lengths) is not None:
                rest = -epoch * self.num_sequences % self._group
                order = group_by_length(order, lengths, self._group, rest, self._seed, epoch)
            self._order = (epoch, order)
        return int(self._order[1][index])


def step_size(config: Config) -> dict[str, Any]:
    """Arguments of a loader that a run's settings say."""
    training = config.training
    return {
        "batch_size": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "seed": training.seed,
    }


def check_same_data(state: Mapping[str, Any], fingerprint: str) -> None:
    """Raise ValueError if a loader's state is of other data than sequences of this fingerprint."""
    if state.get("fingerprint") != fingerprint:
        raise ValueError(
            "the checkpoint was trained on other data than [data] names now (the tokens, how they are packed, or the "
            "shares of a mixture), so its position means nothing here; restore the data, the tokenizer and [data], "
            "or start a new run from the checkpoint's weights (earlier versions put no BOS before plain text, and had "
            "data.group_by_length=false)"
        )


def check_order(config: Config, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a run with these settings does not continue the order of a loader's state."""
    check_same_order(state, config.data.sequence_length, config.training.seed)


def check_same_order(state: Mapping[str, Any], length: int, seed: int) -> None:
    """Raise ValueError if a loader's state is of sequences of another length, or in another order."""
    for name, key, now in (("sequence_length", "data.sequence_length", length), ("seed", "training.seed", seed)):
        if state.get(name) != now:
            raise ValueError(
                f"the checkpoint was made with {key} = {state.get(name)}, now it is {now}: the order of the data "
                f"would not continue; set {key}={state.get(name)}"
            )


class EvalLoader:
    """Held-out sequences in a fixed order, the same number of batches on every rank.

    What a sequence lacks is filled up with `pad_id` in `input_ids` and -100 in `labels`. Whole sequences of that kind
    are added until the ranks have equally many: each of them must take part in each exchange of tokens, and a rank
    without a batch would leave the others waiting.

    Args:
        sequences: What is held out.
        batch_size: B, sequences of one batch.
        dp_rank, dp_size, pad_id: As for `TrainLoader`.
        max_sequences: At most this many, evenly spread over the data. None: all.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_sequences: int | None = None,
        pad_id: int = 0,
    ) -> None:
        self._sequences, self._pad_id = sequences, pad_id
        self._rank, self._ranks = dp_rank, dp_size
        available = len(sequences)
        self.num_sequences = available if max_sequences is None else min(available, max_sequences)
        self._chosen = [i * available // self.num_sequences for i in range(self.num_sequences)]
        # Rows beyond what is there would be empty on all ranks.
        self._batch_size = min(batch_size, max(1, -(-self.num_sequences // dp_size)))

    def __len__(self) -> int:
        """Batches of each rank; 0 if nothing is held out."""
        return -(-self.num_sequences // (self._batch_size * self._ranks))

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            first, of_all = self._rank * self._batch_size, self._ranks * self._batch_size
            together = self._chosen[index * of_all : (index + 1) * of_all]
            rows = [self._sequences[chosen] for chosen in together[first : first + self._batch_size]]
            length = self._sequences.batch_length(np.array(together))
            yield make_batch(self._sequences, rows, self._batch_size, self._pad_id, length)


def make_batch(sequences: Sequences, rows: Listed[Sequence], batch_size: int, pad_id: int, length: int) -> Batch:
    """A batch of these rows, filled up to `length` where they lack tokens, and by empty rows where they are fewer."""
    ids_BL = np.full((batch_size, length), pad_id, dtype=np.int64)
    labels_BL = np.full_like(ids_BL, IGNORED)
    padding_BL = np.ones(ids_BL.shape, dtype=bool)
    # Padding is numbered from 0, so that it is a document.
    positions_BL = np.broadcast_to(np.arange(length), ids_BL.shape).copy()
    ends_BD = np.full((batch_size, sequences.documents), length, dtype=np.int32)
    for place, (ids, labels, positions) in enumerate(rows):
        size = len(ids)
        ids_BL[place, :size], labels_BL[place, :size], padding_BL[place, :size] = ids, labels, False
        if positions is not None:
            positions_BL[place, :size], positions_BL[place, size:] = positions, np.arange(length - size)
            ends = np.append(np.flatnonzero(positions == 0)[1:], size)
            ends_BD[place, : len(ends)] = ends
    batch = {"input_ids": torch.from_numpy(ids_BL), "labels": torch.from_numpy(labels_BL)}
    if sequences.padded:
        batch["padding"] = torch.from_numpy(padding_BL)
    if sequences.packed:
        batch["position_ids"] = torch.from_numpy(positions_BL)
        batch["document_ends"] = torch.from_numpy(ends_BD)
    return batch


def count_targets(labels_BL: Tensor) -> int:
    """How many predictions a causal model's loss is the mean of: all labels but -100, and but each row's first."""
    return int((labels_BL[:, 1:] != IGNORED).sum())


# The batches of a step, the loader's state once they are handed out, and the step's targets and tokens.
Ready = tuple[list[Batch], dict[str, Any], int, int]


class Prefetch:
    """Endless iterator over the steps of a loader, which nobody else uses from now on.

    Args:
        device: where they will go; for a GPU they are in pinned memory.

    Attributes:
        targets, tokens: as `TrainLoader`'s, of the step handed out last.
    """

    def __init__(self, loader: TrainLoader, device: torch.device) -> None:
        self._loader, self._pin, self._state = loader, device.type == "cuda", loader.state_dict()
        # A thread begins on device 0, where other ranks are.
        begin = partial(torch.cuda.set_device, device) if self._pin else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool-data", initializer=begin)
        self._next: Future[Ready] | None = None
        self.targets = self.tokens = 0

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> list[Batch]:
        if self._next is None:
            self._next = self._thread.submit(self._make)
        batches, self._state, self.targets, self.tokens = self._next.result()
        self._next = self._thread.submit(self._make)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """As `TrainLoader.state_dict`, of what was handed out."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `TrainLoader.load_state_dict`."""
        self.drop()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def drop(self) -> None:
        """Give up what was made ahead; it is made again."""
        if self._next is not None:
            self._next.result()
            self._next = None
            self._loader.load_state_dict(self._state)

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self) -> Ready:
        batches = next(self._loader)
        if self._pin:
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        return batches, self._loader.state_dict(), self._loader.targets, self._loader.tokens
