"""`carpool bench model` on a GPU: kernels of every kind are told apart, eager and compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun
from tests.gpu.runs import BENCHES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


def test_kinds_of_kernels(tmp_path: Path) -> None:
    torchrun(2, "carpool.cli", "bench", *BENCHES["kinds of kernels"], "--out", str(tmp_path), seconds=480)
    (case,) = json.loads((tmp_path / "model.json").read_text())["cases"]
    assert case["different"] == []
    for row in case["rows"]:
        assert row["unavailable"] is None and row["on_device"] and row["peak_bytes"] > 0, row["label"]
        busy = {kind["kind"]: kind["busy_ms"] for kind in row["kinds"]}
        for kind in ("experts", "dense", "attention", "loss", "optimizer", "elementwise", "rides", "communication"):
            assert busy[kind] > 0, f"{row['label']}: no {kind}"
            # Nothing is faster than it can be; what is would be of another kind.
            assert case["rooflines"][kind] is None or busy[kind] > 0.5 * case["rooflines"][kind], (row["label"], kind)
        assert (
            sum(row["times"][part] for part in ("host_ms", "host_waits_ms", "launches_ms")) <= 1.25 * row["times"]["ms"]
        )
