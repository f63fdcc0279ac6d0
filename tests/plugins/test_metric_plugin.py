"""A metric in one file outside the package is reduced over ranks, recorded, and drawn in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from carpool.metrics.metric import Metric, register, start_metrics
from carpool.report.page import write_report
from tests.plugins.outside import train_with
from tests.ranks import Ranks
from tests.train.test_loop import TWO, losses, run, weights


def test_it_is_recorded_and_drawn(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    folder, few = tmp_path / "run", [*text, "training.max_steps=2", "training.save_steps=1", "training.eval_steps=none"]
    assert two_ranks(train_with, "router_norm", str(folder), few) == [""] * 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    second = next(line for line in lines if line["kind"] == "train" and line["step"] == 2)
    # Measured before the second update: the norm of the weights that the first checkpoint has.
    saved = [
        value for name, value in weights(folder, 1).items() if name.endswith("gate.weight") and "optim" not in name
    ]
    assert saved and second["metrics"]["router_norm"] == pytest.approx(max(float(w.norm()) for w in saved), rel=1e-5)
    page = write_report(folder).read_text()
    assert "Largest norm of a router" in page and "metric-router_norm" in page
    # It changes nothing.
    assert two_ranks(run, str(tmp_path / "plain"), [*TWO, *few]) == [""] * 2
    assert losses(tmp_path / "plain") == losses(folder)
    assert "metrics" not in json.loads((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()[-1])


class OwnNumber(Metric):
    """On rank r: r + 1, and none on rank 1 with `gaps`."""

    help, gaps = "A number of each rank.", False

    def measure(self, model: nn.Module) -> torch.Tensor | float | None:
        rank = dist.get_rank()
        return None if self.gaps and rank == 1 else torch.tensor(-rank - 1.0)


def reduced(over_ranks: str, gaps: bool) -> dict[str, float]:
    about: dict[str, Any] = {"name": "own", "over_ranks": over_ranks, "gaps": gaps}
    metric = type("Own", (OwnNumber,), about)()
    return start_metrics([metric], nn.Identity(), torch.device("cpu")).read()


@pytest.mark.parametrize(
    ("over_ranks", "gaps", "value"), [("mean", False, -1.5), ("sum", False, -3), ("max", False, -1), ("mean", True, -1)]
)
def test_it_is_one_number_of_all_ranks(two_ranks: Ranks, over_ranks: str, gaps: bool, value: float) -> None:
    assert two_ranks(reduced, over_ranks, gaps) == [{"own": value}] * 2


def test_a_metric_that_lacks_something_is_refused() -> None:
    with pytest.raises(ValueError, match="has no `measure`"):
        register(type("Bare", (Metric,), {"name": "bare", "help": "Nothing."}))
    with pytest.raises(ValueError, match="needs name, an identifier, and help"):
        register(type("Unnamed", (OwnNumber,), {"name": "no name"}))
    with pytest.raises(ValueError, match="expected mean, sum or max"):
        register(type("Median", (OwnNumber,), {"name": "median", "over_ranks": "median"}))
