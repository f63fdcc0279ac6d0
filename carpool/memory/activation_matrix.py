"""MoE-Infinity's prediction (Xue et al., arXiv 2401.14361): the activations of a text resemble those of earlier texts.

An *activation matrix* counts, of one text, how many of its tokens have chosen each expert of each layer. Matrices of
texts that ended are recorded. While a text is made, its matrix so far is compared with them: the distance of two is 1
less the cosine similarity of their rows, averaged over the layers. The nearest one says which experts come next:

    text so far    layer 0: 3 0 1 0    layer 1: nothing yet
    recorded       layer 0: 9 1 2 0    layer 1: 0 7 0 5      similarity 0.98: the nearest
                   layer 0: 0 4 0 8    layer 1: 6 6 0 0      similarity 0
    likely         of layer 1: experts 1, 3

Who stays in a cache of experts is ordered by (share of its layer's activations in this text + epsilon) x (1 - layer /
layers): the first layers, which have the least time ahead of them, stay rather than the last.

The paper keeps as many matrices as represent all texts (k-means, offline) and orders fetches of all further layers by
priority. Here the last texts are recorded, and experts come one layer ahead. A batch of texts counts as one.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from carpool.memory.next_experts import Counts, largest, shares

# As in the paper's experiments: 100 to 300 suffice.
RECORDED = 100
_EPSILON = 1e-3


class ActivationMatrices:
    """Records activations, text by text: a `carpool.memory.next_experts.Predictor`."""

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
