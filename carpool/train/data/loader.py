"""From one long array of tokens to batches, in an order that depends on the seed and on nothing else.

Sequences. Documents lie end to end in the array, an EOS after each, and sequence i of length L is tokens
`i(L-1) .. i(L-1)+L-1`: neighbours share one token. `input_ids` and `labels` are both those L tokens, because
transformers' models shift the labels themselves (position t is trained to predict label t+1, and the last position
nothing). Thanks to the shared token every token of the array but the first is predicted exactly once per epoch:

    tokens 0 1 2 3 4 5 6, L = 4:   [0 1 2 3]  predicts 1 2 3
                                   [3 4 5 6]  predicts 4 5 6

Order. Epoch e visits all sequences in a permutation made from (seed, e). The stream of all epochs is endless, and
optimizer step s takes G = micro-batch x accumulation x data-parallel ranks sequences of it, sG .. sG+G-1; of these
rank r of W takes r, r+W, r+2W, ... So the set of sequences in a step is the same for any W with the same G, the
position in the stream is one number, and a checkpoint of it can be continued on another number of ranks. A batch may
straddle two epochs; only tokens after the last whole sequence (fewer than L) are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]
IGNORED = -100


class TrainLoader:
    """Endless iterator over optimizer steps: each item is the list of this rank's micro-batches.

    Args:
        tokens: All training tokens (`Corpus.train`).
        fingerprint: `Corpus.fingerprint`: what a saved position belongs to.
        sequence_length: L.
        batch_size: B, sequences of one micro-batch.
        accumulation: Micro-batches of one step.
        dp_rank: This rank among those that see distinct data, 0 .. dp_size-1. Ranks that share their data (tensor
            parallelism) give the same.
        dp_size: The number of those.
        seed: Seed of the order.

    A micro-batch is `{"input_ids": BL, "labels": BL}`, int64, on the CPU.

    Raises:
        ValueError: there are fewer sequences than one step takes.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        fingerprint: str,
        sequence_length: int,
        batch_size: int,
        accumulation: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._tokens, self._fingerprint, self._length, self._seed = tokens, fingerprint, sequence_length, seed
        self._batch_size, self._accumulation, self._rank, self._ranks = batch_size, accumulation, dp_rank, dp_size
        self.num_sequences = max(0, (len(tokens) - 1) // (sequence_length - 1))
        self.global_batch_size = batch_size * accumulation * dp_size
        # Predicted tokens of a step, over all ranks with distinct data: no sequence is padded.
        self.targets = self.global_batch_size * (sequence_length - 1)
        self._position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
        if self.num_sequences < self.global_batch_size:
            raise ValueError(
                f"data.train has {len(tokens)} tokens, {self.num_sequences} sequences of data.sequence_length = "
                f"{sequence_length}, but one step takes {self.global_batch_size} sequences "
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
        first = self._position + self._rank
        places = range(first, self._position + self.global_batch_size, self._ranks)
        rows_BL = [self._sequence(self._at(place)) for place in places]
        self._position += self.global_batch_size
        batches = []
        for start in range(0, len(rows_BL), self._batch_size):
            ids_BL = torch.from_numpy(np.stack(rows_BL[start : start + self._batch_size]))
            batches.append({"input_ids": ids_BL, "labels": ids_BL.clone()})
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The position, equal on all ranks: plain numbers and text."""
        return {
            "position": self._position,
            "epoch": self._position // self.num_sequences,
            "num_sequences": self.num_sequences,
            "sequence_length": self._length,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken, also on another number of ranks or with another batch size.

        Raises:
            ValueError: the data, sequence length or seed are not those of the saved position.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                "the checkpoint was trained on other data than data.train is now (the tokens differ), so its position "
                "means nothing here; restore the data and tokenizer, or start a new run from the checkpoint's weights"
            )
        for name, key, now in (
            ("sequence_length", "data.sequence_length", self._length),
            ("seed", "training.seed", self._seed),
        ):
            if state.get(name) != now:
                raise ValueError(
                    f"the checkpoint was made with {key} = {state.get(name)}, now it is {now}: the order of the data "
                    f"would not continue; set {key}={state.get(name)}"
                )
        self._position = int(state["position"])

    def _at(self, place: int) -> int:
        """The sequence at this place of the endless stream."""
        epoch, index = divmod(place, self.num_sequences)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self.num_sequences, self._seed, epoch))
        return int(self._order[1][index])

    def _sequence(self, index: int) -> NDArray[np.int64]:
        start = index * (self._length - 1)
        return self._tokens[start : start + self._length].astype(np.int64)


class EvalLoader:
    """Held-out sequences in a fixed order, the same number of batches on every rank.

    The last sequence is filled up with `pad_id` in `input_ids` and -100 in `labels`. Whole sequences of that kind
    are added until the ranks have equally many: each of them must take part in each exchange of tokens, and a rank
    without a batch would leave the others waiting.

    Args:
        tokens: All held-out tokens (`Corpus.eval`).
        sequence_length: L.
        batch_size: B, sequences of one batch.
        dp_rank: As for `TrainLoader`.
        dp_size: As for `TrainLoader`.
        max_sequences: At most this many, evenly spread over the data. None: all.
        pad_id: Any token.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        sequence_length: int,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_sequences: int | None = None,
        pad_id: int = 0,
    ) -> None:
        self._tokens, self._length, self._batch_size, self._pad_id = tokens, sequence_length, batch_size, pad_id
        self._rank, self._ranks = dp_rank, dp_size
        available = -(-(len(tokens) - 1) // (sequence_length - 1)) if len(tokens) > 1 else 0
        self.num_sequences = available if max_sequences is None else min(available, max_sequences)
        self._chosen = [i * available // self.num_sequences for i in range(self.num_sequences)]

    def __len__(self) -> int:
        """Batches of each rank; 0 if nothing is held out."""
        return -(-self.num_sequences // (self._batch_size * self._ranks))

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            first = (index * self._ranks + self._rank) * self._batch_size
            ids_BL = torch.full((self._batch_size, self._length), self._pad_id, dtype=torch.int64)
            labels_BL = torch.full_like(ids_BL, IGNORED)
            for row, chosen in enumerate(self._chosen[first : first + self._batch_size]):
                start = chosen * (self._length - 1)
                tokens_L = torch.from_numpy(self._tokens[start : start + self._length].astype(np.int64))
                ids_BL[row, : len(tokens_L)] = tokens_L
                labels_BL[row, : len(tokens_L)] = tokens_L
            yield {"input_ids": ids_BL, "labels": labels_BL}


def count_targets(labels_BL: Tensor) -> int:
    """How many predictions a causal model's loss is the mean of: all labels but -100, and but each row's first."""
    return int((labels_BL[:, 1:] != IGNORED).sum())


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0 .. size-1 that depends on these numbers alone, whatever the version of numpy.

    Sorting by the splitmix64 hash of each index is a random permutation (ties, if any, stay in order), and unlike
    numpy's generators its stream is not allowed to change between versions: a resumed run may have another.
    """
    key = _splitmix64(_splitmix64(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    return np.argsort(_splitmix64(np.arange(size, dtype=np.uint64) + key), kind="stable")


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
