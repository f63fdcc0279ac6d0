"""The soak compares every tensor and every step, and a short one finds no difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from carpool.train.checkpoints.manager import CheckpointManager
from tools.soak import differences, soak


def test_every_tensor_and_step_is_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("whole", "same", "other"):
        CheckpointManager(tmp_path / name).save(2, model, optimizer, {})
        lines = [{"kind": "train", "step": step, "loss": 1.0, "grad_norm": 2.0, "tokens_seen": 3} for step in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text if name != "other" else text.replace("2.0", "2.5", 1))
        with torch.no_grad():
            if name == "same":
                model.bias[4] += 1e-6
    assert differences(tmp_path / "same", tmp_path / "whole", 2) == []
    wrong = differences(tmp_path / "other", tmp_path / "whole", 2)
    assert [line.split(":")[0] for line in wrong] == ["model/bias", "step 1"]
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    with pytest.raises(FileNotFoundError):
        differences(tmp_path / "other", tmp_path / "whole", 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    found = soak(tmp_path, minutes=0.5, steps=40, seed=3, patience=300)
    assert found["faults"] and not found["hangs"] and not found["wrong"], found
