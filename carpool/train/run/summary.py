"""What a run's steps come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def summarise_steps(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and means of "train" records (docs/run-directory.md), as in summary.json."""
    # The first step of a process warms up allocators, caches and connections.
    steady = records[1:] or records
    share = {
        span: statistics.median(r["ms"][span]["total"] / r["step_ms"] for r in steady)
        for span in ("dispatch", "experts", "combine")
    }
    mfu = [r["mfu"] for r in steady if r["mfu"] is not None]
    return {
        "copies_per_token": statistics.fmean(r["copies_per_token"] for r in records),
        "step_ms_median": statistics.median(r["step_ms"] for r in steady),
        "ride_share": share["dispatch"] + share["combine"],
        "share": {**share, "rest": max(0.0, 1.0 - sum(share.values()))},
        "tokens_per_second_median": statistics.median(r["tokens_per_second"] for r in steady),
        "mfu_median": statistics.median(mfu) if mfu else None,
    }
