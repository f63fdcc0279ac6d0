"""A run of two ranks stopped in the middle: by kill -9 of a rank, by SIGTERM. Resuming changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from carpool import cli
from carpool.report.read import read_run
from carpool.train.checkpoints.manager import CheckpointManager, step_of
from carpool.train.checkpoints.resume import checkpoint_to_resume
from carpool.train.config import load_config
from carpool.train.launch.stopping import Stopped
from carpool.train.run.run import train
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, same_weights, start, weights

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


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    two_ranks: Ranks, text: list[str], whole: Losses, tmp_path: Path
) -> None:
    """By kill -9 of one rank. Runs that are killed past a checkpoint: test_features.py."""
    settings = [*text, *LONG, "training.save_steps=none", "training.resume_from_checkpoint=auto"]
    output = tmp_path / "killed"
    process = started(output, settings)
    try:
        # Past the step at which the next one ends: nothing of the steps that were lost may count.
        wait_for_step(output, STEPS + 2, lambda: output_of(process))
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "rank 1" in shown and "SIGKILL" in shown and "resume_from_checkpoint=auto" in shown, shown
    assert start(two_ranks, output, [*settings, f"training.stop_at_step={STEPS}"]) == [""] * 2
    assert {one.step: (one.loss, one.grad_norm) for one in read_run(output).train} == whole
    # And with a checkpoint there it goes on.
    assert start(two_ranks, output, [*settings, f"training.stop_at_step={STEPS + 1}"]) == [""] * 2
    assert read_run(output).train[-1].step == STEPS + 1
    starts = json.loads((output / "run.json").read_text())["history"]
    assert [one["from_step"] for one in starts] == [0, STEPS]


def stopped_by_signal(output: str, settings: list[str]) -> str:
    """On a rank: train until rank 1 gets a SIGTERM, after the second step; what is said then."""

    def send() -> None:
        wait_for_step(Path(output), 2)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Stopped) as stopped:
        train(load_config(None, [*MODEL, *settings, f"training.output_dir={output}"]), command="test")
    return str(stopped.value)


def test_sigterm_loses_no_step(two_ranks: Ranks, text: list[str], whole: Losses, tmp_path: Path) -> None:
    settings = [*text, *LONG, "training.save_steps=none"]
    output = tmp_path / "stopped"
    said = two_ranks(stopped_by_signal, str(output), settings)
    assert all(check_stopped(output) in one for one in said), said
    assert resumed(two_ranks, output, settings) == whole


@pytest.mark.slow
def test_a_run_saves_when_it_is_asked(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """And goes on. Killed later, it goes on from there, with the bits of one that nothing stopped, averages too."""
    settings = [*text, *LONG, "training.save_steps=none", "training.ema_decay=0.9"]
    output, uncut, runner = tmp_path / "asked", tmp_path / "uncut", CliRunner()
    process = started(output, settings)
    try:
        wait_for_step(output, 1, lambda: output_of(process))
        (output / "save_request").touch()
        both = runner.invoke(cli.app, ["checkpoint", str(output)])
        said = runner.invoke(cli.app, ["checkpoint", str(output)]) if both.exit_code else both
        assert said.exit_code == 0, said.output
        path = Path(said.stdout.strip())
        assert path.parent == output / "checkpoints" and CheckpointManager(output).latest() == path
        assert not list(output.glob("save_request*"))
        (output / "save_request.taken").touch()  # a step has begun to save for another
        other = runner.invoke(cli.app, ["checkpoint", str(output)])
        assert other.exit_code == 1 and "is asked for a checkpoint already" in other.output
        (output / "save_request.taken").write_text("an answer that nobody has read")
        step = step_of(path)
        assert step is not None
        wait_for_step(output, step + 1, lambda: output_of(process))
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        shown, _ = process.communicate(timeout=PATIENCE)
        assert "SIGKILL" in shown and "resume_from_checkpoint=last" in shown, shown
    finally:
        process.kill()
    late = runner.invoke(cli.app, ["checkpoint", str(output)])
    assert (
        late.exit_code == 1 and f"no run is writing into {output} now: its newest checkpoint is {path}" in late.output
    )
    more = [*settings, f"training.stop_at_step={step + 3}"]
    assert start(two_ranks, output, [*more, "training.resume_from_checkpoint=last"]) == [""] * 2
    assert start(two_ranks, uncut, more) == [""] * 2
    assert any(name.startswith("ema/") for name in weights(output, step + 3))
    assert same_weights(output, uncut, step + 3)


def check_stopped(output: Path) -> str:
    """Was a run stopped after its last step? What it says of that."""
    step = max(losses(output))
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["signal"]) == ("stopped", step, "SIGTERM")
    path = output / "checkpoints" / f"step-{step:08d}"
    return f"stopped by SIGTERM after step {step} of 1000; continue from {path} with the same command"


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


def output_of(process: subprocess.Popen[str]) -> str | None:
    return None if process.poll() is None else process.communicate()[0]


def wait_for_step(output: Path, step: int, ended: Callable[[], str | None] = lambda: None) -> None:
    """Until a run has taken a step. ended: what its process has written when it has ended, or None while it goes on."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (output / "metrics.jsonl").exists() and f'"step": {step},' in (output / "metrics.jsonl").read_text():
            return
        if (shown := ended()) is not None:
            pytest.fail(f"the run ended by itself: {shown}")
        time.sleep(0.05)
    pytest.fail("the run did not get going")


def pid_of_rank(agent: int, rank: int) -> int:
    for child in psutil.Process(agent).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return int(child.pid)
    pytest.fail(f"no rank {rank} below process {agent}")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("read no further", marks=pytest.mark.slow),
        "full",
        pytest.param("closed from the start", marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written_ends_no_run(text: list[str], tmp_path: Path, how: str) -> None:
    output, errors = tmp_path / "run", tmp_path / "errors"
    settings = [*text, "parallelism.device=cpu", "parallelism.num_ranks=1", "training.max_steps=2"]
    command = [sys.executable, "-X", "importtime", "-m", "carpool", "train"]
    train = [*command, *MODEL, *settings, f"training.output_dir={output}"]
    end = {"read no further": "| head -n 1", "full": "> /dev/full", "closed from the start": ">&-"}[how]
    script = f'set -o pipefail; "$@" 2> {errors} {end}'
    ran = subprocess.run(["bash", "-c", script, "bash", *train], stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    said = errors.read_text()
    assert ran.returncode == 0 and "Traceback" not in said, said
    assert said.count("standard output cannot be written any more") == (0 if how == "closed from the start" else 1)
    assert len(losses(output)) == 2 and (output / "checkpoints" / "step-00000002").is_dir()
    # The agent lives as long as the run, and leaves Transformers to the ranks.
    imported = re.findall(r"^import time:.*\| +(\S+)$", said, flags=re.MULTILINE)
    assert "carpool.train.launch.start" in imported and "transformers" not in imported


def test_auto_does_not_begin_where_checkpoints_were_lost(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    assert checkpoint_to_resume("auto", tmp_path, checkpoints) is None
    damaged = tmp_path / "checkpoints" / "step-00000003"
    damaged.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds no checkpoint that can be read.*step-00000003.*restore one"):
        checkpoint_to_resume("auto", tmp_path, checkpoints)
    damaged.rmdir()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="restore one, or delete that folder"):
        checkpoint_to_resume("auto", tmp_path, checkpoints)
