"""What a step reads from the device: one small tensor, and nothing more with more layers."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import carpool
from carpool.train.config import load_config
from carpool.train.run.loop import loop
from carpool.train.run.run import start_run
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, records

PACKAGE = str(Path(carpool.__file__).parent)
STEPS = 5


class Reads(TorchDispatchMode):
    """Counts where the package reads a tensor: a number (`item`, `int`, `bool`), or all of it (`tolist`)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def note(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        self.counts[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))


def reads(output: str, overrides: list[str]) -> Counter[str]:
    """On a rank: where the steps of a run read tensors, without what rides on a CPU must know on the host."""
    run = start_run(load_config(None, [f"training.output_dir={output}", *overrides]), None, "test")
    whole = torch.Tensor.tolist
    try:
        with run.stop, Reads() as found:

            def tolist(tensor: torch.Tensor) -> Any:
                found.note()
                return whole(tensor)

            with mock.patch.object(torch.Tensor, "tolist", tolist):
                loop(run)
    finally:
        run.close()
    rooms = ("ride", "transport", "layer", "layout", "experts", "routing")
    return Counter({place: count for place, count in found.counts.items() if place.split("/")[0] not in rooms})


def test_a_step_reads_one_tensor(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*MODEL, *text, f"training.max_steps={STEPS}", "training.gradient_accumulation_steps=2"]
    settings += ["training.eval_on_start=false", "training.eval_steps=none", "training.save_steps=none"]
    found = two_ranks(reads, str(tmp_path / "run"), settings)
    for counts in found:
        # Numbers of rides are looked at once they are on the host, which a CPU cannot tell apart.
        assert (
            not {"hf/ride_metrics.py:start", "hf/observe/metrics.py:_counts", "metrics/counters.py:totals"}
            & counts.keys()
        )
        waits = {place: count for place, count in counts.items() if not place.startswith("hf/ride_metrics.py")}
        assert waits == {"train/run/loop.py:update": STEPS}, counts
    assert list(records(tmp_path / "run")) == list(range(1, STEPS + 1))
