"""A run of two ranks stopped in the middle, for real: by kill -9 of a rank, by SIGTERM. Resuming changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from carpool.train.launch.stopping import EXIT_STOPPED
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, start, text

__all__ = ["text"]  # a fixture

Losses = dict[int, tuple[float, float]]
pytestmark = pytest.mark.timeout(900)
STEPS = 8
# Seconds for a busy machine to start the ranks, or to end them. By themselves they end after 600
# (parallelism.timeout_seconds).
PATIENCE = 300
LONG = ["training.max_steps=1000", "training.eval_steps=none", "training.sample_prompt=none"]
RANKS = ["parallelism.device=cpu", "parallelism.num_ranks=2"]


@pytest.fixture(scope="module")
def whole(two_ranks: Ranks, text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses of the run that nothing stopped."""
    output = tmp_path_factory.mktemp("whole") / "run"
    settings = [*text, *LONG, "training.save_steps=none", f"training.stop_at_step={STEPS}"]
    assert start(two_ranks, output, settings) == [""] * 2
    return losses(output)


def test_kill_9_of_one_rank(two_ranks: Ranks, text: list[str], whole: Losses, tmp_path: Path) -> None:
    settings = [*text, *LONG, "training.save_steps=2"]
    output = tmp_path / "killed"
    process = started(output, settings)
    try:
        wait_for_step(output, 3, process)
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rank 1" in shown and "SIGKILL" in shown and "resume_from_checkpoint=last" in shown, shown
    assert resumed(two_ranks, output, settings) == whole


def test_sigterm_loses_no_step(two_ranks: Ranks, text: list[str], whole: Losses, tmp_path: Path) -> None:
    settings = [*text, *LONG, "training.save_steps=none"]
    output = tmp_path / "stopped"
    process = started(output, settings)
    try:
        wait_for_step(output, 2, process)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED, shown
    step = max(losses(output))
    path = output / "checkpoints" / f"step-{step:08d}"
    assert f"stopped by SIGTERM after step {step} of 1000; continue from {path} with the same command" in shown
    assert "Traceback" not in shown and "error" not in shown
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["signal"]) == ("stopped", step, "SIGTERM")
    assert resumed(two_ranks, output, settings) == whole


def resumed(two_ranks: Ranks, output: Path, settings: list[str]) -> Losses:
    """Losses of the first steps, after the run has gone on to them."""
    if max(losses(output)) < STEPS:
        more = [*settings, f"training.stop_at_step={STEPS}", "training.resume_from_checkpoint=last"]
        assert start(two_ranks, output, more) == [""] * 2
    return {step: value for step, value in losses(output).items() if step <= STEPS}


def started(output: Path, settings: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "carpool", "train", *MODEL, *RANKS, *settings, f"training.output_dir={output}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
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
