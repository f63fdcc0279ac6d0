"""Which experts the next layer is likely to choose in training: those that the last batches chose, the most popular
first.

The tokens of a batch choose most experts of each layer, so what one layer chooses says little about the next one
(`carpool.memory.next_experts`). How many tokens an expert had in the last batches says much:

    tokens of experts      0    1    2    3
    batch 1                8    2    0    0        expected    8    2    0    0
    batch 2                6    0    4    0                    7    1    2    0
    likely, few = 1        0, 2                    expert 1 and 3 come if they are chosen, or are computed by the CPU

APTMoE (SC 2024) loads experts ahead by their predicted popularity.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from carpool.memory.next_experts import Counts, shares


class Popularity:
    """A `carpool.memory.next_experts.Predictor`.

    Args:
        layers, experts: their numbers.
        few: experts with at most so many tokens need not come.
    """

    def __init__(self, layers: int, experts: int, few: int = 0) -> None:
        self._few = few
        self._expected: npt.NDArray[np.float64] = np.zeros((layers, experts))
        self._known = [False] * layers

    def begin(self) -> None:
        """Nothing is forgotten: batches follow each other."""

    def saw(self, layer: int, counts: Counts) -> None:
        """As of `Predictor`. A batch counts twice as much as the one before it."""
        new = np.zeros(self._expected.shape[1])
        new[list(counts)] = list(counts.values())
        self._expected[layer] = (self._expected[layer] + new) / 2 if self._known[layer] else new
        self._known[layer] = True

    def likely(self, layer: int, counts: Counts) -> list[int]:
        """The experts of the layer after this one that expect more than a few tokens."""
        expected = self._expected[layer + 1]
        best = np.argsort(-expected, kind="stable")
        return [int(one) for one in best if expected[one] > self._few + 0.5]

    def priority(self) -> npt.NDArray[np.float64]:
        """As of `Predictor`: what an expert has of its layer's choices."""
        return shares(self._expected)
