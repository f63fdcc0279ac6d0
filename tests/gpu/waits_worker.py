"""What tests/gpu/test_waits_gpu.py runs on every GPU: where the steps of a run wait for the device.

waits OUTPUT SETTINGS...     `carpool train`'s own steps; the line that rank 0 prints names the places
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

import carpool
from carpool.train.config import load_config
from carpool.train.run import loop
from carpool.train.run.run import start_run
from tests.gpu.ranks import run_mode

PACKAGE = str(Path(carpool.__file__).parent)
# Buffers and compiled kernels are made in the first steps.
FIRST = 6
# Where a step may wait: for its losses, and for whether all rows had a place.
ALLOWED = {"train/run/loop.py", "transport/nvlink/buffers.py", "train/steps/capacity.py"}


def update(run):  # type: ignore[no-untyped-def]
    """A step, in which the places that wait are counted once the run is warm."""
    torch.cuda.set_sync_debug_mode("warn" if run.step > FIRST else "default")
    return take_step(run)


take_step = loop.update


def waits(output: str, *settings: str) -> tuple[bool, str]:
    run = start_run(load_config(None, [f"training.output_dir={output}", *settings]), None, "test")
    with warnings.catch_warnings(record=True) as caught, run.stop, mock.patch.object(loop, "update", update):
        warnings.simplefilter("always")
        loop.loop(run)
    torch.cuda.set_sync_debug_mode("default")
    run.close()
    places: Counter[str] = Counter()
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            name = warning.filename
            places[str(Path(name).relative_to(PACKAGE)) if name.startswith(PACKAGE) else name] += 1
    return set(places) <= ALLOWED, ", ".join(f"{place} {count}" for place, count in sorted(places.items()))


if __name__ == "__main__":
    run_mode({"waits": waits})
