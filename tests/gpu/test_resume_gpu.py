"""Two ranks on GPUs: a run that moves experts, stopped and resumed, against one that never stopped, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
STOP, STEPS = 9, 16
SETTINGS = [
    "training.full_determinism=true", f"training.max_steps={STEPS}", f"training.save_steps={STOP}",
    "moe.schedule=auto", "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
    "training.save_pretrained=false", "parallelism.num_ranks=2", "placement.every=5", "placement.lag=2",
    "placement.hysteresis=0", "placement.solver=search",
]  # fmt: skip


def train(output: Path, *overrides: str) -> None:
    arguments = ["train", *SETTINGS, f"training.output_dir={output}", *overrides]
    torchrun(2, "carpool.cli", *arguments, seconds=240)


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
    train(tmp_path / "parts", f"training.stop_at_step={STOP}")
    # Two runs may measure different schedules. What one has measured it takes again.
    schedule = json.loads((tmp_path / "parts" / "run.json").read_text())["decisions"]["schedule"]
    train(tmp_path / "parts", "training.resume_from_checkpoint=last")
    chosen = [f"moe.chunks={schedule['chunks']}"] if schedule["name"] in ("chunks", "tiles") else []
    train(tmp_path / "whole", f"moe.schedule={schedule['name']}", *chosen)
    whole, parts = told(tmp_path / "whole"), told(tmp_path / "parts")
    steps, decided, _ = whole
    assert len(steps) == STEPS and decided[0]["event"] == "moved"
    assert decided[0]["step"] < STOP < decided[-1]["step"]
    assert whole == parts
