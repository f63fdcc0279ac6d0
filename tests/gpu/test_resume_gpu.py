"""Two ranks on GPUs: a run that moves experts, stopped and resumed, against one that never stopped, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import STEPS, STOP, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


def told(output: Path) -> tuple[dict[int, tuple[float, float]], list[dict[str, Any]], Any]:
    """Losses and gradient norms by step; what was decided about experts; the layouts."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"}
    decided = [
        {key: line.get(key) for key in ("step", "event", "why", "experts", "before", "predicted")}
        for line in lines
        if line["kind"] == "placement" and line["event"] in ("moved", "kept")
    ]
    return steps, decided, json.loads((output / "layout.json").read_text())


def test_a_resumed_run_with_moving_experts_is_that_which_never_stopped(tmp_path: Path) -> None:
    train("moving, stopped", tmp_path / "parts")
    # Two runs may measure different schedules. What one has measured it takes again.
    schedule = json.loads((tmp_path / "parts" / "run.json").read_text())["decisions"]["schedule"]
    train("moving, resumed", tmp_path / "parts", "training.resume_from_checkpoint=last")
    chosen = [f"moe.chunks={schedule['chunks']}"] if schedule["name"] in ("chunks", "tiles") else []
    train(f"moving {schedule['name']}", tmp_path / "whole", *chosen)
    whole, parts = told(tmp_path / "whole"), told(tmp_path / "parts")
    steps, decided, _ = whole
    assert len(steps) == STEPS and decided[0]["event"] == "moved"
    assert decided[0]["step"] < STOP < decided[-1]["step"]
    assert whole == parts
