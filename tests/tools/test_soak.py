"""The soak compares every tensor and every step, and a short one finds no difference."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from carpool.train.checkpoints.manager import CheckpointManager
from tools.faults import DAMAGE, Faults, Run, is_alive, is_damaged, state_of
from tools.soak import differences


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
    assert differences(tmp_path / "same", tmp_path / "whole", 2) == ([], [])
    wrong, missing = differences(tmp_path / "other", tmp_path / "whole", 2)
    assert [line.split(":")[0] for line in wrong] == ["model/bias", "step 1"] and missing == []
    lines = (tmp_path / "same" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "same" / "metrics.jsonl").write_text(lines[1])
    assert differences(tmp_path / "same", tmp_path / "whole", 2) == ([], [1])
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    with pytest.raises(FileNotFoundError):
        differences(tmp_path / "other", tmp_path / "whole", 2)


def test_a_fault_counts_where_it_has_struck(tmp_path: Path) -> None:
    """Processes that are gone already, and checkpoints that are not there, do not count."""
    run = SimpleNamespace(folder=tmp_path, agents=[], step=lambda: 7, ranks=dict, newest=lambda: None, writers=list)
    said: list[str] = []
    faults = Faults(cast(Run, run), random.Random(0), False, False, False, said.append)
    process = subprocess.Popen(["sleep", "60"])
    run.ranks = lambda: {0: process.pid}
    faults.soft = {"rank paused": faults.soft["rank paused"]}
    assert faults.add(hard=False) and state_of(process.pid) == "T" and not faults.add(hard=False)
    faults.settle()
    while not is_alive(process.pid):
        pass
    faults.hard = {"rank killed": faults.hard["rank killed"]}
    assert faults.add(hard=True) and process.wait() == -9 and not faults.add(hard=True)
    assert faults.counts == {"rank paused": 1, "rank killed": 1} == faults.missed
    assert len(said) == 2 and f"step 7: rank killed: {process.pid} was alive, and is gone" in said[1]


@pytest.mark.parametrize("how", ["cut", "spoilt", "deleted"])
@pytest.mark.parametrize("name", ["state.json", "model/shard-00001-model-00001-of-00001.safetensors"])
def test_a_damaged_file_is_known(tmp_path: Path, how: str, name: str) -> None:
    model = torch.nn.Linear(3, 5)
    saved = CheckpointManager(tmp_path).save(2, model, torch.optim.AdamW(model.parameters()), {})
    assert saved is not None and not is_damaged(saved.path)
    DAMAGE[f"file {how}"](saved.path / name)
    assert is_damaged(saved.path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """In a process of its own: that of other tests has threads, and cannot be forked."""
    given = ["--minutes", "1", "--steps", "60", "--seed", "3", "--out", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, "-m", "tools.soak", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["faults"] and not found["hangs"] and not found["wrong"], found
