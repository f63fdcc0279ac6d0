"""Which experts the next layer is likely to choose, from what the layers before it chose; and which should stay.

Experts of successive layers go together: who was served by expert 3 of layer 7 is often served by the same few of layer
8. So what was seen is counted, pair by pair, and the experts whose counts with those chosen now are the largest come
first:

    seen           layer 0 chose 3, 5 and layer 1 chose 1, 4;   layer 0 chose 3, 6 and layer 1 chose 1, 2
    now            layer 0 chooses 3, 6
    counts         of layer 1: expert 1 has 3, expert 2 has 2, expert 4 has 1
    likely         1, 2

An expert that tokens of this text choose often stays, and one that other texts chose counts half with each text that
begins. Plug-ins bring further predictors ("carpool.predictors"), as carpool_systems does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from carpool.plugins import Registry

# How many tokens of a forward have chosen each expert.
Counts = Mapping[int, int]


class Predictor(Protocol):
    """What says which experts are wanted next.

    It is constructed with the numbers of layers and of experts in a layer."""

    def begin(self) -> None:
        """New texts begin."""

    def saw(self, layer: int, counts: Counts) -> None:
        """A layer has chosen these experts. Layers come in their order, forward after forward."""

    def likely(self, layer: int, counts: Counts) -> list[int]:
        """The experts that the layer after this one is likely to choose: as many as this one has chosen, at most."""

    def priority(self) -> npt.NDArray[np.float64]:
        """Of each layer and expert, how much it should stay on the device."""


class NextExperts:
    """Counts choices of successive layers."""

    def __init__(self, layers: int, experts: int) -> None:
        self._pairs = np.zeros((layers, experts, experts), dtype=np.float32)
        self._seen = np.zeros((layers, experts))
        self._before: tuple[int, list[int]] = (-1, [])

    def begin(self) -> None:
        self._seen /= 2
        self._before = -1, []

    def saw(self, layer: int, counts: Counts) -> None:
        chosen = list(counts)
        self._seen[layer, chosen] += list(counts.values())
        number, before = self._before
        if number == layer - 1 and before and chosen:
            self._pairs[number][np.ix_(before, chosen)] += 1
        self._before = layer, chosen

    def likely(self, layer: int, counts: Counts) -> list[int]:
        return largest(self._pairs[layer, list(counts)].sum(0), len(counts))

    def priority(self) -> npt.NDArray[np.float64]:
        return shares(self._seen)


PREDICTORS: Registry[Callable[..., Predictor]] = Registry("predictor", "carpool.predictors", {"pairs": NextExperts})


def largest(scores: npt.NDArray[np.floating], count: int) -> list[int]:
    """The numbers of the largest scores above 0, the largest first; of equal ones, the lowest numbers."""
    best = np.argsort(-scores, kind="stable")[:count]
    return [int(one) for one in best if scores[one] > 0]


def shares(counts_LE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What each expert has of its layer's choices."""
    share: npt.NDArray[np.float64] = counts_LE / np.maximum(counts_LE.sum(1, keepdims=True), 1e-9)
    return share
