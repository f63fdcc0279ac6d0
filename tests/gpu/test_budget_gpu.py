"""A memory budget on GPUs: what policies cost is measured over the real transport, and nothing of it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


def run(name: str, output: Path, *of_the_test: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run.json, lines of steps)."""
    lines = train(name, output, *of_the_test)
    return json.loads((output / "run.json").read_text()), [line for line in lines if line["kind"] == "train"]


def test_a_budget_is_kept_by_what_was_measured(tmp_path: Path) -> None:
    info, plain = run("no budget", tmp_path / "plain")
    total = info["predicted"]["memory_per_rank_bytes"]["total"]
    info, steps = run("budget", tmp_path / "budget", f"memory.budget={int(0.9 * total)}B")
    assert info["decisions"]["memory"]["how"] == "measured"
    # A layer that is computed again takes longer. (Its activations alone may take too little to be measured.)
    assert info["decisions"]["memory"]["milliseconds"]["layer_activations"]["recompute"] > 0
    assert info["predicted"]["memory_per_rank_bytes"]["total"] <= 0.9 * total
    # The same bits, in less memory; the measurement before it has given all back.
    assert [one["loss"] for one in steps] == [one["loss"] for one in plain]
    assert steps[-1]["memory_peak_bytes"] < plain[-1]["memory_peak_bytes"]
