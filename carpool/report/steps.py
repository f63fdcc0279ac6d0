"""The step time of a run, and what is measured with it: one definition for the terminal, the report and comparisons.

A step's `step_ms` is the wall time from fetching its batch to reading its last number, on rank 0. Evaluations,
checkpoints, samples and moves of experts lie between steps and are not in it.

The **step time** of a run is the median of `step_ms` over its *steady* steps: all but the first one after each start of
the process, which warms up allocators, caches and connections. Shares, speed and MFU are medians over the same steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from carpool.report.schema import PARTS, Train

STEP_TIME = "median of the steps after warm-up, without evaluations and checkpoints"
"""The definition in words, as pages and the terminal give it."""


def steady(train: Sequence[Train], starts: Collection[int]) -> list[Train]:
    """The steps that count for times. `starts`: the first step of each process; a run of these alone keeps them."""
    return [t for t in train if t.step not in starts] or list(train)


def summarise_steps(train: Sequence[Train], starts: Collection[int]) -> dict[str, Any]:
    """Medians and means of `train` records, under the names of summary.json; None for what no step measured."""
    used = steady(train, starts)
    share = {}
    for part in PARTS[:-1]:
        spent = median(
            None if (ms := t.part_ms(part, "total")) is None or not t.step_ms else ms / t.step_ms for t in used
        )
        if spent is not None:
            share[part] = spent
    rides = [share[part] for part in ("dispatch", "combine") if part in share]
    copies = [t.copies_per_token for t in train if t.copies_per_token is not None]
    return {
        "copies_per_token": statistics.fmean(copies) if copies else None,
        "step_ms_median": median(t.step_ms for t in used),
        "ride_share": sum(rides) if rides else None,
        "share": {**share, "rest": max(0.0, 1.0 - sum(share.values()))} if share else {},
        "tokens_per_second_median": median(t.tokens_per_second for t in used),
        "mfu_median": median(t.mfu for t in used),
    }


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured and is a number; None if nothing was."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.median(known) if known else None
