"""A rank killed in mid-run, for real: the others stop, the message names it, and resuming changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, start, text

__all__ = ["text"]  # a fixture

STEPS = 8


def test_kill_9_of_one_rank(ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [
        *text,
        "training.max_steps=1000",
        "training.save_steps=2",
        "training.eval_steps=none",
        "training.sample_prompt=none",
    ]
    assert start(ranks, tmp_path / "whole", [*settings, f"training.stop_at_step={STEPS}"]) == [""] * 4

    output = tmp_path / "killed"
    command = [sys.executable, "-c", "from carpool.cli import main; main()", "train", *MODEL, *settings]
    process = subprocess.Popen(
        [*command, f"training.output_dir={output}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for_step(output, 3, process)
        os.kill(pid_of_rank(process.pid, 2), signal.SIGKILL)
        begin = time.monotonic()
        shown, _ = process.communicate(timeout=60)
        assert time.monotonic() - begin < 30
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rank 2" in shown and "SIGKILL" in shown and "resume_from_checkpoint=last" in shown, shown

    before = losses(output)
    if max(before) < STEPS:
        resumed = [*settings, f"training.stop_at_step={STEPS}", "training.resume_from_checkpoint=last"]
        assert start(ranks, output, resumed) == [""] * 4
    whole, after = losses(tmp_path / "whole"), losses(output)
    assert {step: after[step] for step in whole} == whole


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if (output / "metrics.jsonl").exists() and f'"step": {step},' in (output / "metrics.jsonl").read_text():
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended by itself: {process.communicate()[0]}")
        time.sleep(0.05)
    pytest.fail("the run did not get going")


def pid_of_rank(agent: int, rank: int) -> int:
    for child in psutil.Process(agent).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return int(child.pid)
    pytest.fail(f"no rank {rank} below process {agent}")
