"""`benchmarks.peaks`: settings are runs, and what is counted is what runs take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.peaks import SETTINGS, growth, measure
from carpool.train.config import load_config
from tests.ranks import Ranks


def count(folder: str, only: list[str]) -> None:
    config = load_config(None, [f"training.output_dir={folder}", "parallelism.num_ranks=4"])
    measure(config, {"only": only, "steps": 1, "seconds": 200, "tiny": True, "out": f"{folder}/peaks.json"})


def check(ranks: Ranks, folder: Path, only: list[str]) -> None:
    ranks(count, str(folder), only)
    found = json.loads((folder / "peaks.json").read_text())
    assert found["failed"] == {}
    assert [one["setting"] for one in found["results"]] == only
    for one in found["results"]:
        assert one["measured"]["tensors"] > one["measured"]["stays"] > 0, one["setting"]
        assert one["ratios"]["tensors"] == pytest.approx(1, abs=0.1), one["setting"]


def test_a_setting_is_a_run(two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, tmp_path, ["adapters"])


@pytest.mark.slow
def test_all_settings_are_runs(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, tmp_path, list(SETTINGS))


def test_the_growth_of_memory_is_the_most_that_is_there_at_a_time() -> None:
    def work() -> None:
        one = torch.empty(1000)
        two = torch.empty(500)
        del one
        three = torch.empty(700)
        del two, three

    assert growth(work) == pytest.approx(6000, rel=0.05)
