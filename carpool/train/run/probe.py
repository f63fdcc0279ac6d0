"""Step time of this run's transport against another's, measured in this run.

A few probe steps, forward and backward on one batch, alternate between the two transports, so that a noisy machine is
noisy for both. Nothing is updated: gradients are thrown away and the random state is put back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from carpool.hf import transport
from carpool.hf.observe.metrics import RideMetrics
from carpool.observe.clock import timed
from carpool.transport import TransportOptions

REPETITIONS = 5


def compare(
    model: nn.Module,
    ways: Mapping[str, TransportOptions],
    step: Callable[[], Any],
    metrics: RideMetrics,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Time `step` (a forward and backward) under two transports with their options. All ranks call it together.

    Returns:
        For each name: `step_ms`, milliseconds of each repetition on the slowest rank, and `bytes_remote` of one step.
    """
    result: dict[str, dict[str, Any]] = {name: {"step_ms": [], "bytes_remote": 0} for name in ways}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for repetition in range(-1, REPETITIONS):
            # Whoever goes first in one round goes second in the next.
            for name in ways if repetition % 2 else reversed(tuple(ways)):
                with transport(model, name, ways[name]):
                    metrics.reset()
                    took = timed(step, device)
                    model.zero_grad(set_to_none=True)
                    moved = metrics.collect(device).record["bytes_remote"]
                if repetition >= 0:  # the first round warms up
                    result[name]["step_ms"].append(took.ms)
                    result[name]["bytes_remote"] = moved
    return result


def summarise(result: dict[str, dict[str, Any]], ours: str, theirs: str) -> dict[str, Any]:
    """Medians and their ratio (theirs over ours: above 1, ours is faster)."""
    ours_ms = statistics.median(result[ours]["step_ms"])
    theirs_ms = statistics.median(result[theirs]["step_ms"])
    return {
        "transport": theirs,
        "step_ms": theirs_ms,
        "ours_step_ms": ours_ms,
        "ratio": theirs_ms / ours_ms,
        "repetitions": len(result[ours]["step_ms"]),
    }
