"""Which experts the next layer is likely to choose, from what the layers before it chose.

Experts of successive layers go together: who was served by expert 3 of layer 7 is often served by the same few of layer
8. So what was seen is counted, pair by pair, and the experts whose counts with those chosen now are the largest come
first:

    seen           layer 0 chose 3, 5 and layer 1 chose 1, 4;   layer 0 chose 3, 6 and layer 1 chose 1, 2
    now            layer 0 chooses 3, 6
    counts         of layer 1: expert 1 has 3, expert 2 has 2, expert 4 has 1
    likely         1, 2

MoE-Infinity (arXiv 2401.14361) compares the activations of a whole sequence with recorded ones. Pairs of layers need no
record, and learn while tokens are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class NextExperts:
    """Counts choices of successive layers.

    Attributes:
        asked, right: experts that layers have chosen which had been predicted for, and those of them that were
            predicted.
    """

    def __init__(self) -> None:
        self.asked = self.right = 0
        self._counts: dict[int, npt.NDArray[np.float32]] = {}
        self._before: tuple[int, list[int]] = (-1, [])
        self._predicted: tuple[int, set[int]] | None = None

    def saw(self, layer: int, chosen: Sequence[int]) -> None:
        """A layer has chosen these experts."""
        before, experts = self._before
        if before == layer - 1 and experts and chosen:
            self._count(before, experts, chosen)
        if self._predicted is not None and self._predicted[0] == layer:
            self.asked += len(chosen)
            self.right += len(self._predicted[1].intersection(chosen))
        self._before, self._predicted = (layer, list(chosen)), None

    def likely(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """The experts that the layer after this one is likely to choose: as many as this one has chosen, at most."""
        counts = self._counts.get(layer)
        if counts is None or not chosen:
            return []
        known = [expert for expert in chosen if expert < len(counts)]
        scores = counts[known].sum(0)
        # Of equal scores, the lowest numbers.
        best = np.argsort(-scores, kind="stable")[: len(chosen)]
        found = [int(expert) for expert in best if scores[expert] > 0]
        self._predicted = layer + 1, set(found)
        return found

    def _count(self, layer: int, chosen: Sequence[int], following: Sequence[int]) -> None:
        size = max(*chosen, *following) + 1
        counts = self._counts.get(layer, np.zeros((0, 0), dtype=np.float32))
        if size > len(counts):
            counts = np.pad(counts, (0, size - len(counts)))
            self._counts[layer] = counts
        counts[np.ix_(chosen, following)] += 1
