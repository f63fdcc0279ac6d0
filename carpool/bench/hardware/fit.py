"""Latency and bandwidth of something that moves bytes: `seconds = alpha + bytes / beta`, by least squares.

    bytes 1e5, 1e6, 1e7 in 0.2, 1.1, 10.1 ms    ->    alpha 0.1 ms, beta 1e9 bytes/s, residual 0

A point weighs as the inverse of its time. So the latency is not lost in the noise of large messages, as it would be if
all weighed the same; and large messages decide on the bandwidth, which small ones that fit into some buffer on the way
seem to exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from carpool.planner.machine.hardware import LinkRate


@dataclass(frozen=True)
class Fit:
    """Attributes:
    name: of what was measured.
    rate: latency and bandwidth.
    residual: root of the mean square of (fitted - measured) / measured.
    points: (bytes, seconds) that were measured.
    """

    name: str
    rate: LinkRate
    residual: float
    points: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(name: str, points: Sequence[tuple[int, float]]) -> Fit:
    """The line through at least two points of different sizes. Where the best latency would be negative, it is 0."""
    size_N, seconds_N = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    weight_N = 1 / np.sqrt(seconds_N)
    terms_N2 = np.stack([np.ones_like(size_N), size_N], axis=1) * weight_N[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(terms_N2, seconds_N * weight_N, rcond=None)
    if alpha < 0 or per_byte <= 0:
        alpha, per_byte = 0.0, float(size_N.sum() / (size_N**2 / seconds_N).sum())
    residual_N = (alpha + per_byte * size_N) / seconds_N - 1
    rate = LinkRate(float(1 / per_byte), float(alpha))
    return Fit(name, rate, float(np.sqrt((residual_N**2).mean())), tuple((int(n), float(s)) for n, s in points))
