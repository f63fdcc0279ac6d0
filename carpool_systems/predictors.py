"""Which experts come ahead of their layer, as two published systems foretell it (`carpool.memory.next_experts`).

    matrix     MoE-Infinity: the activations of a text resemble those of earlier texts (`carpool generate --predictor`)
    popular    APTMoE: the experts of the last batches (`memory.expert_loading` of `carpool train`)

The built-in "pairs" is right more often than "matrix", and brings in less for nothing.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from carpool.memory.next_experts import Counts, largest, shares

# As in MoE-Infinity's experiments: 100 to 300 suffice.
RECORDED = 100
_EPSILON = 1e-3


class ActivationMatrices:
    """Records activations, text by text (Xue et al., arXiv 2401.14361).

    An *activation matrix* counts, of one text, how many of its tokens have chosen each expert of each layer. Matrices
    of texts that ended are recorded. While a text is made, its matrix so far is compared with them: the distance of two
    is 1 less the cosine similarity of their rows, averaged over the layers. The nearest one says which experts come
    next:

        text so far    layer 0: 3 0 1 0    layer 1: nothing yet
        recorded       layer 0: 9 1 2 0    layer 1: 0 7 0 5      similarity 0.98: the nearest
                       layer 0: 0 4 0 8    layer 1: 6 6 0 0      similarity 0
        likely         of layer 1: experts 1, 3

    Who stays in a cache of experts is ordered by (share of its layer's activations in this text + epsilon) x (1 - layer
    / layers): the first layers, which have the least time ahead of them, stay rather than the last.

    The paper keeps as many matrices as represent all texts (k-means, offline) and orders fetches of all further layers
    by priority. Here the last texts are recorded, and experts come one layer ahead. A batch of texts counts as one.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._now = np.zeros((layers, experts))
        # Recorded matrices, and the lengths of their rows.
        self._recorded: deque[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = deque(maxlen=RECORDED)
        self._first = 1 - np.arange(layers)[:, None] / layers

    def begin(self) -> None:
        if self._now.any():
            self._recorded.append((self._now, np.linalg.norm(self._now, axis=1)))
            self._now = np.zeros_like(self._now)

    def saw(self, layer: int, counts: Counts) -> None:
        self._now[layer, list(counts)] += list(counts.values())

    def likely(self, layer: int, counts: Counts) -> list[int]:
        if not self._recorded:
            return []
        matrices = np.stack([matrix for matrix, _ in self._recorded])
        lengths = np.stack([length for _, length in self._recorded]) * np.linalg.norm(self._now, axis=1)
        similarity = (np.einsum("nle,le->nl", matrices, self._now) / np.maximum(lengths, 1e-9)).mean(1)
        return largest(matrices[similarity.argmax(), layer + 1], len(counts))

    def priority(self) -> npt.NDArray[np.float64]:
        return (shares(self._now) + _EPSILON) * self._first


class Popularity:
    """The experts that the last batches chose, the most popular first (Wei et al., APTMoE, SC 2024).

    The tokens of a batch choose most experts of each layer, so what one layer chooses says little about the next one.
    How many tokens an expert had in the last batches says much:

        tokens of experts      0    1    2    3
        batch 1                8    2    0    0        expected    8    2    0    0
        batch 2                6    0    4    0                    7    1    2    0
        likely, few = 1        0, 2                    expert 1 and 3 come if chosen, or are computed by the CPU

    Args:
        layers, experts: their numbers.
        few: experts with at most so many tokens need not come.
    """

    def __init__(self, layers: int, experts: int, few: int = 0) -> None:
        self.few = few
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
        return [int(one) for one in best if expected[one] > self.few + 0.5]

    def priority(self) -> npt.NDArray[np.float64]:
        """As of `Predictor`: what an expert has of its layer's choices."""
        return shares(self._expected)
