"""Kill, stop, start and starve the processes of a run at random; then compare it with one that nobody disturbed.

    python -m tools.soak --minutes 10
    python -m tools.soak --minutes 10 --seed 7 --out soak.json

Four agents of one gloo rank each take the steps of a small model, as `carpool train --elastic 4:4`. Until the time is
over, faults come at random. What ends is started again, with the same command. At the end of each run every tensor of
its last checkpoint (model and optimizer), and the loss and the norm of the gradient of every step, must equal those of
the run without faults, bit by bit. A run that takes no step for `--patience` seconds hangs.

Faults are of three kinds. After one that ends processes the next such one waits until the run takes steps again:

    ends processes   kill a rank; kill an agent; kill the rank that writes a checkpoint; stop a rank for good;
                     ask an agent to leave (SIGTERM); cut, spoil or delete a file of the newest checkpoint (and kill
                     a rank)
    stops them       SIGSTOP and SIGCONT of a rank, or of an agent
    starves them     the disk is full for some seconds

The run's folder is on a disk of its own: a tmpfs, for which this must be root. Otherwise the disk is never full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from carpool.train.checkpoints.manager import CheckpointManager

ROOT = Path(__file__).parents[1]
AGENTS, SAVE_STEPS, DISK = 4, 5, "32m"
SETTINGS = (
    "model.model_type=olmoe", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts=8", "model.config.num_experts_per_tok=3", "data.sequence_length=32",
    "data.max_bytes=200000", "training.per_device_train_batch_size=1", "training.warmup_steps=2",
    "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
    "training.save_pretrained=false", f"training.save_steps={SAVE_STEPS}", "training.save_total_limit=4",
    "data.eval_fraction=0.0", "parallelism.device=cpu", f"parallelism.num_ranks={AGENTS}",
)  # fmt: skip
# Of the pauses between faults, of processes that are stopped, and of a full disk.
PAUSE_SECONDS, STOP_SECONDS, FULL_SECONDS = (0.5, 3.0), (0.2, 6.0), (0.5, 4.0)


class Run:
    """The agents of one run, which are started again when they end."""

    def __init__(self, folder: Path, cache: Path, steps: int) -> None:
        self.folder, self.steps, self.log = folder, steps, cache.parent / f"{folder.parent.name}.log"
        settings = [
            *SETTINGS,
            f"training.max_steps={steps}",
            f"data.cache_dir={cache}",
            f"training.output_dir={folder}",
        ]
        self.command = [sys.executable, "-m", "carpool", "train", "--elastic", f"{AGENTS}:{AGENTS}", *settings]
        self.agents: list[subprocess.Popen[bytes]] = [self._start() for _ in range(AGENTS)]
        self.ended, self._read = Counter[int](), (0, 0)

    def _start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, cwd=ROOT, env=env)

    @property
    def done(self) -> bool:
        return (self.folder / "summary.json").exists()

    def revive(self) -> None:
        """Start agents that have ended before the run has; their codes are counted."""
        for place, agent in enumerate(self.agents):
            if agent.poll() is not None and not self.done:
                self.ended[agent.returncode] += 1
                self.agents[place] = self._start()

    def step(self) -> int:
        """The step that was recorded last."""
        path, found = self.folder / "metrics.jsonl", 0
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            for line in file.read().splitlines():
                with suppress(ValueError):
                    record = json.loads(line)
                    found = record["step"] if record["kind"] == "train" else found
        return found

    def ranks(self) -> list[psutil.Process]:
        found = []
        for agent in self.agents:
            with suppress(psutil.Error):
                children = psutil.Process(agent.pid).children()
                found += [one for one in children if "carpool.train.launch.worker" in one.cmdline()]
        return found

    def writers(self) -> list[psutil.Process]:
        """Rank 0, while a checkpoint is being written."""
        if not list((self.folder / "checkpoints").glob(".tmp-step-*")):
            return []
        found = []
        for one in self.ranks():
            with suppress(psutil.Error):
                found += [one] if one.environ().get("RANK") == "0" else []
        return found

    def end(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
                agent.kill()
            agent.wait()


class Faults:
    """What is done to a run, at random."""

    def __init__(self, run: Run, chance: random.Random, disk: bool) -> None:
        self.run, self.chance, self.disk = run, chance, disk
        self.counts: Counter[str] = Counter()
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._writer_until = 0.0
        self.hard = {
            "rank killed": self.kill_rank, "agent killed": self.kill_agent, "writer killed": self.kill_writer,
            "rank stopped for good": self.stop_rank_for_good, "agent asked to leave": self.ask_agent,
            "file cut": lambda: self.damage(lambda path: os.truncate(path, path.stat().st_size // 2)),
            "file spoilt": lambda: self.damage(_spoil),
            "file deleted": lambda: self.damage(Path.unlink),
        }  # fmt: skip
        self.soft = {"rank paused": self.pause_rank, "agent paused": self.pause_agent}
        if disk:
            self.soft["disk full"] = self.fill_disk

    def add(self, hard: bool) -> bool:
        """One fault, if what it needs is there; whether it was."""
        names = self.hard if hard else self.soft
        name = self.chance.choice(list(names))
        with suppress(psutil.Error, ProcessLookupError, FileNotFoundError):
            if names[name]():
                self.counts[name] += 1
                return True
        return False

    def tend(self) -> None:
        """What was put off: continue stopped processes, empty the disk."""
        now = time.monotonic()
        due, self._later = [one for one in self._later if one[0] <= now], [one for one in self._later if one[0] > now]
        for _, act in due:
            with suppress(psutil.Error, ProcessLookupError, FileNotFoundError):
                act()

    def settle(self) -> None:
        self._later = [(0.0, act) for _, act in self._later]
        self.tend()

    def _after(self, seconds: tuple[float, float], act: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + self.chance.uniform(*seconds), act))

    def kill_rank(self) -> bool:
        ranks = self.run.ranks()
        if ranks:
            self.chance.choice(ranks).kill()
        return bool(ranks)

    def kill_agent(self) -> bool:
        self.chance.choice(self.run.agents).kill()
        return True

    def kill_writer(self) -> bool:
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            if writers := self.run.writers():
                writers[0].kill()
                return True
            time.sleep(0.002)
        return False

    def stop_rank_for_good(self) -> bool:
        ranks = self.run.ranks()
        if ranks:
            self.chance.choice(ranks).suspend()
        return bool(ranks)

    def ask_agent(self) -> bool:
        self.chance.choice(self.run.agents).send_signal(signal.SIGTERM)
        return True

    def damage(self, spoil: Callable[[Path], object]) -> bool:
        """Of the newest checkpoint; an older one is there. Then a rank is killed, so that one is read."""
        whole = CheckpointManager(self.run.folder).list()
        if len(whole) < 3 or self.run.step() > self.run.steps - 4 * SAVE_STEPS:
            return False
        spoil(self.chance.choice(sorted(path for path in whole[-1].rglob("*") if path.is_file())))
        return self.kill_rank()

    def pause_rank(self) -> bool:
        ranks = self.run.ranks()
        if ranks:
            one = self.chance.choice(ranks)
            one.suspend()
            self._after(STOP_SECONDS, one.resume)
        return bool(ranks)

    def pause_agent(self) -> bool:
        agent = self.chance.choice(self.run.agents)
        agent.send_signal(signal.SIGSTOP)
        self._after(STOP_SECONDS, lambda: agent.send_signal(signal.SIGCONT))
        return True

    def fill_disk(self) -> bool:
        path = self.run.folder.parent / f"filler-{self.chance.random()}"
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self._after(FULL_SECONDS, path.unlink)
        return True


def _spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    found: dict[str, torch.Tensor] = {}
    for part in ("model", "optimizer"):
        metadata = HuggingFaceStorageReader(str(folder / "checkpoints" / f"step-{step:08d}" / part)).read_metadata()
        for index, stored in (metadata.storage_data or {}).items():
            about: Any = metadata.state_dict_metadata[index.fqn]
            with safe_open(stored.relative_path, "pt") as file:
                piece = file.get_tensor(index.fqn)
            whole = found.setdefault(f"{part}/{index.fqn}", torch.zeros(tuple(about.size), dtype=piece.dtype))
            whole[tuple(slice(o, o + n) for o, n in zip(index.offset or (), piece.shape, strict=True))] = piece
    return found


def numbers(folder: Path) -> dict[int, tuple[Any, ...]]:
    """Loss, norm of the gradient and tokens so far, of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("loss", "grad_norm", "tokens_seen")
    return {line["step"]: tuple(line[key] for key in keys) for line in lines if line["kind"] == "train"}


def differences(folder: Path, reference: Path, steps: int) -> list[str]:
    """What is not as in the run without faults, one line each."""
    found, expected = tensors(folder, steps), tensors(reference, steps)
    wrong = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
    took, wanted = numbers(folder), numbers(reference)
    wrong += [f"step {step}: {took.get(step)}, not {wanted[step]}" for step in wanted if took.get(step) != wanted[step]]
    return wrong


@contextmanager
def own_disk(folder: Path) -> Iterator[bool]:
    """A small disk at this folder, if that may be mounted here."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def disturb(run: Run, faults: Faults, until: float, patience: float) -> tuple[bool, float]:
    """Let faults come until the run has ended, or the time is over. (Whether it hung, the longest pause.)"""
    latest, since, longest, again, after, quiet = run.step(), time.monotonic(), 0.0, 0, 0.0, 2
    while not run.done:
        faults.tend()
        run.revive()
        now, step = time.monotonic(), run.step()
        if step != latest:
            longest, latest, since, quiet = max(longest, now - since), step, now, 2
        if now - since > patience:
            return True, now - since
        if now > until:
            faults.settle()
        elif now > after and quiet:
            # Of a run that takes no steps, processes are stopped twice, and none is killed.
            hard = step >= again and step > SAVE_STEPS and faults.chance.random() < 0.6
            if faults.add(hard):
                quiet -= not hard
                again = step + faults.chance.randint(2, 3 * SAVE_STEPS) if hard else again
            after = time.monotonic() + faults.chance.uniform(*PAUSE_SECONDS)
        time.sleep(0.1)
    faults.settle()
    end = time.monotonic() + patience
    while any(agent.poll() is None for agent in run.agents) and time.monotonic() < end:
        time.sleep(0.2)
    return time.monotonic() > end, longest


def soak(
    folder: Path, minutes: float, steps: int, seed: int, patience: float, logs: Path | None = None
) -> dict[str, Any]:
    """Runs with faults for so long, and what came of them. `logs`: gets what agents wrote."""
    chance, cache, counts, ended = random.Random(seed), folder / "cache", Counter[str](), Counter[int]()
    whole = Run(folder / "whole", cache, steps)
    try:
        hung, _ = disturb(whole, Faults(whole, chance, False), 0.0, patience)
    finally:
        whole.end()
    if hung:
        raise SystemExit(f"the run without faults takes no steps:\n{whole.log.read_text()[-3000:]}")
    until = time.monotonic() + 60 * minutes
    rounds, hangs, wrong, longest, recoveries = 0, 0, list[str](), 0.0, list[dict[str, Any]]()
    while time.monotonic() < until and not hangs:
        with own_disk(folder / f"disk{rounds}") as disk:
            run = Run(folder / f"disk{rounds}" / "run", cache, steps)
            faults = Faults(run, chance, disk)
            try:
                hung, pause = disturb(run, faults, until, patience)
            finally:
                run.end()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run.log, logs / f"run{rounds}.log")
            rounds, hangs, longest = rounds + 1, hangs + hung, max(longest, pause)
            counts, ended = counts + faults.counts, ended + run.ended
            if hung:
                wrong.append(f"hung after step {run.step()}:\n{run.log.read_text(errors='replace')[-6000:]}")
                continue
            wrong += differences(run.folder, whole.folder, steps)
            lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
            recoveries += [line for line in lines if line["kind"] == "recovery"]
            print(f"run {rounds}: {sum(faults.counts.values())} faults, {dict(faults.counts)}", flush=True)
            print(f"  agents ended with {dict(run.ended)}; {len(wrong)} differences so far", flush=True)
    return {
        "faults": sum(counts.values()), "by_kind": dict(counts.most_common()), "runs": rounds, "steps": steps * rounds,
        "tensors": len(tensors(whole.folder, steps)) * rounds, "hangs": hangs, "longest_pause_seconds": longest,
        "agents_ended": dict(ended), "recoveries": len(recoveries), "wrong": wrong,
        "recovery_seconds": {
            key: sorted(one[key] for one in recoveries)[len(recoveries) // 2]
            for key in ("regroup", "imports", "build", "load", "first_step")
            if recoveries
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without a step that are a hang")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    parser.add_argument("--logs", type=Path, help="a folder that gets what the agents of each run wrote")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = soak(Path(folder), given.minutes, given.steps, given.seed, given.patience, given.logs)
    text = json.dumps(found, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    return int(bool(found["wrong"] or found["hangs"]))


if __name__ == "__main__":
    raise SystemExit(main())
