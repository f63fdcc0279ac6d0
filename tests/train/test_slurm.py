"""The script for Slurm in the guide, as it stands there, with an `srun` that starts and ends tasks as Slurm's does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.train.config import load_config
from tests.ranks import free_port
from tests.train.test_launch import PATIENCE, wait_for
from tests.train.test_loop import MODEL

ROOT = Path(__file__).parents[2]
STEPS = 300
TASKS = 2

# Signals of a scheduler go to the tasks, not to srun, and srun reports the highest code. With --kill-on-bad-exit=1 the
# first task that leaves with an error lets Slurm kill the others.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
options = [a for a in sys.argv[1:] if a.startswith("-")][:2]
command = sys.argv[1 + len(options):]
assert command[0] == "carpool", command
kill = any(a in ("--kill-on-bad-exit", "--kill-on-bad-exit=1", "-K", "-K1") for a in options)
step = dict(SLURM_NTASKS="{TASKS}", SLURM_STEP_ID="0", SLURM_JOB_ID="4711", SLURM_STEP_NODELIST="localhost")
tasks = [
    subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | step | dict(SLURM_PROCID=str(n), SLURM_LOCALID=str(n)),
    )
    for n in range({TASKS})
]
with open("tasks.part", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
os.rename("tasks.part", "tasks")
while any(task.poll() is None for task in tasks):
    if kill and any(task.returncode for task in tasks):
        for task in tasks:
            task.kill()
    time.sleep(0.01)
sys.exit(max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks))
"""


class Job:
    """A batch job of the guide's script in a folder; `scontrol requeue` is noted, and not done."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder, self.run = folder, folder / "run"
        (block,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/multi-node.md").read_text(), re.S)
        assert block.count("\nRUN=") == 1
        script = re.sub(r"\nRUN=.*", f"\nRUN={self.run}", block)
        (folder / "job.sh").write_text(script)
        (folder / "olmoe.toml").write_text(load_config(None, settings).to_toml())
        scontrol = f'#!/bin/sh\necho "$@" >> {folder}/requeued\n'
        (folder / "bin").mkdir()
        for name, content in (("srun", SRUN), ("scontrol", scontrol)):
            (folder / "bin" / name).write_text(content)
            (folder / "bin" / name).chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        for name in ("tasks", "requeued"):
            (self.folder / name).unlink(missing_ok=True)
        env = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "4711",
            "SLURM_CPUS_PER_TASK": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """As Slurm sends it: to the tasks of the step."""
        wait_for(lambda: (self.folder / "tasks").exists() or process.poll() is not None)
        pids = [int(pid) for pid in (self.folder / "tasks").read_text().split()]
        wait_for(lambda: all(_listens(pid, number) for pid in pids) or process.poll() is not None)
        for pid in pids:
            os.kill(pid, number)

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        records = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [record["step"] for record in records if record["kind"] == "train"]

    def requeued(self) -> str:
        path = self.folder / "requeued"
        return path.read_text() if path.exists() else ""


def _listens(pid: int, number: int) -> bool:
    """Python has started, and has a handler of this signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()) or ["0"]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_preempted_again_and_again_takes_each_step_once(text: list[str], tmp_path: Path) -> None:
    settings = [*MODEL, *text, "parallelism.device=cpu", f"training.max_steps={STEPS}", "training.eval_steps=none"]
    settings += ["training.save_steps=none", "training.sample_prompt=none", "training.eval_on_start=false"]
    job = Job(tmp_path, settings)

    # While it is set up: nothing is saved yet.
    process = job.start()
    job.signal(process, signal.SIGTERM)
    shown, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, job.requeued(), job.steps()) == (75, "requeue 4711\n", []), shown
    assert "Traceback" not in shown and shown.count("while the run was being set up") == 1, shown

    # Between two steps.
    process = job.start()
    wait_for(lambda: job.steps() or process.poll() is not None)
    job.signal(process, signal.SIGUSR1)
    shown, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, job.requeued()) == (75, "requeue 4711\n"), shown
    done = job.steps()
    assert done == list(range(1, len(done) + 1)) and len(done) < STEPS, shown

    process = job.start()
    shown, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, job.requeued()) == (0, ""), shown
    assert job.steps() == list(range(1, STEPS + 1)), shown
