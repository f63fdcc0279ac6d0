"""How long a kind of kernel takes on a device: `latency + flops / rate + bytes / bandwidth`, with its uncertainty.

    H200, forward of experts: 65,536 pairs, H 2048, F 768, 64 experts, 0.62 TFLOP    1.3 ms, give or take 5 %

The three terms add up. Kernels that overlapped them perfectly would take the largest, and none does: the sum fits
grouped products of 200 to 2,000 rows an expert within 5 % (`HARDWARE["H200"]`, from docs/measurements.md).

    kind                 operations                               bytes
    dense                2 m n k of one product                   both factors and the result
    experts              6 H F for each pair                      pairs (2 H + 3 F), and the weights once
    experts backward     12 H F                                   pairs (4 H + 8 F), and the weights three times
    attention D          4 D for each head and pair of tokens     none; D is the size of queries and keys
    attention D backward 10 D                                     none
    elementwise          none                                     read and written
    optimizer            none                                     read and written in one update
    launch               none: its latency is what the host needs to launch a kernel
    host ride            none: the same of an MoE layer's forward and backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

Source = Literal["measured", "fitted", "datasheet", "assumed"]
# How far a time may be off if its rate was not measured on this device, as (shorter, longer).
SPREAD: Mapping[str, tuple[float, float]] = {
    "measured": (0.97, 1.05), "fitted": (0.93, 1.10), "datasheet": (0.80, 1.30), "assumed": (0.67, 1.60),
}  # fmt: skip
HEAD_SIZES = (64, 128, 192)


@dataclass(frozen=True)
class Work:
    """One kind of kernel.

    Attributes:
        flops_per_second, bytes_per_second: None: that term is 0.
        latency: seconds.
        residual: root of the mean square of (fitted - measured) / measured; 0 if it is of one point.
        source: where it is from.
    """

    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    latency: float = 0.0
    residual: float = 0.0
    source: Source = "assumed"

    def seconds(self, flops: float, moved: float = 0.0) -> float:
        """Of one kernel, or of several that are one after the other but for their latencies."""
        found = self.latency
        if self.flops_per_second is not None:
            found += flops / self.flops_per_second
        if self.bytes_per_second is not None:
            found += moved / self.bytes_per_second
        return found

    @property
    def spread(self) -> tuple[float, float]:
        """What a time may be, as factors."""
        low, high = SPREAD[self.source]
        return min(low, 1 - self.residual), max(high, 1 + self.residual)


def fit_work(points: Sequence[tuple[float, float, float]]) -> Work:
    """The best sum of terms, none of them negative, through (flops, bytes, seconds).

    A point weighs as the inverse of its time, so the residual is one of shares.
    """
    terms_N3 = np.array([(1.0, flops, moved) for flops, moved, _ in points])
    seconds_N = np.array([seconds for *_, seconds in points])
    terms_N3 = terms_N3 / seconds_N[:, None]
    best: tuple[float, dict[int, float]] | None = None
    for number in range(1, min(3, len(points)) + 1):
        for chosen in combinations(range(3), number):
            if not terms_N3[:, chosen].any(0).all():
                continue
            found_C, *_ = np.linalg.lstsq(terms_N3[:, chosen], np.ones(len(points)), rcond=None)
            residual = float(np.sqrt(((terms_N3[:, chosen] @ found_C - 1) ** 2).mean()))
            if (found_C > 0).all() and (best is None or residual < best[0] - 1e-6):
                best = residual, dict(zip(chosen, found_C.tolist(), strict=True))
    assert best is not None, "every kernel takes time"
    residual, of = best
    rates = [1 / of[term] if term in of else None for term in (1, 2)]
    return Work(rates[0], rates[1], of.get(0, 0.0), residual, "measured")


def read_work(settings: Mapping[str, Any] | None) -> dict[str, Work]:
    """From a file of `carpool doctor --measure`; nothing for files of earlier versions."""
    return {name: Work(**one) for name, one in (settings or {}).items()}
