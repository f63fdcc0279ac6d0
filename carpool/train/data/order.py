"""The order of an epoch: a permutation of its sequences, and steps of similar lengths.

Lengths. Where a sequence is one example, windows of up to 50 steps of the permutation are sorted by length, and their
steps follow each other in random order (`data.group_by_length`):

    lengths of a permutation, steps of 2        3 9 | 4 8 | 9 3 | 5 4   ->   8 5 | 3 3 | 9 9 | 4 4
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def group_by_length(
    order: NDArray[np.int64], lengths: NDArray[np.int64], group: int, rest: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """An epoch's permutation with steps of `group` sequences of similar lengths; see the module's docstring. The first
    `rest` belong to a step that began in the epoch before."""
    steps = (len(order) - rest) // group
    first, last = rest, rest + steps * group
    if steps < 2:
        return order
    window = group * min(50, max(1, steps // 4))
    parts = [order[place : min(place + window, last)] for place in range(first, last, window)]
    sorted_SG = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts]).reshape(-1, group)
    return np.concatenate([order[:first], sorted_SG[permutation(steps, seed, epoch)].ravel(), order[last:]])


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
