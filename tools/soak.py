"""Kill, stop, start and starve the processes of a run at random; then compare it with one that nobody disturbed.

    python -m tools.soak --minutes 10
    python -m tools.soak --minutes 10 --seed 7 --out soak.json
    python -m tools.soak --sum soak1.json soak2.json            the table of several soaks together

Four agents of one gloo rank each take the steps of a small model, as `carpool train --elastic 4:4`. Until the time is
over, faults come at random, drawn by the seed. What ends is started again, with the same command. At the end of each
run every tensor of its last checkpoint (model and optimizer), and the loss, the norm of the gradient and the tokens of
every recorded step, must equal those of the run without faults, bit by bit. A run that takes no step for `--patience`
seconds hangs. Runs are drawn, too: with checkpoints written beside training or not, with snapshots or without.

    ends processes   kill a rank, an agent, a node (agent, rank and writers at once), all agents, the rank that writes a
                     checkpoint, the writer beside training; stop a rank or a writer for good; ask an agent to leave
                     (SIGTERM); kill a rank and with it its node's snapshots; kill all ranks, and cut, spoil or delete
                     a file of the newest checkpoint
    stops them       SIGSTOP and SIGCONT of a rank, an agent, or a writer
    starves them     the disk is full for some seconds

After a fault that ends processes the next one waits until the run takes steps again, but for one in five, which comes
while it recovers. Each fault is one line of the output, with how it is known to have struck: a process that was alive
and then was not, or stood still; a file that differs from its sum; a disk that takes no byte. What was drawn but did
not strike is not counted.

The run's folder is on a disk of its own: a tmpfs, for which this must be root. Otherwise the disk is never full.
Processes are forked from one that has imported all (`tools.forking`); with `--start` they are started.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tools.faults import AGENTS, SAVE_STEPS, Faults, Run
from tools.forking import Server, import_all
from tools.imported import IMPORTED

DISK = "32m"
SETTINGS = (
    "model.model_type=olmoe", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts=8", "model.config.num_experts_per_tok=3", "data.sequence_length=32",
    "data.max_bytes=200000", "training.per_device_train_batch_size=1", "training.warmup_steps=2",
    "training.eval_steps=none", "training.eval_on_start=false", "training.sample_prompt=none",
    "training.save_pretrained=false", f"training.save_steps={SAVE_STEPS}", "training.save_total_limit=4",
    "data.eval_fraction=0.0", "parallelism.device=cpu", f"parallelism.num_ranks={AGENTS}",
    "parallelism.timeout_seconds=60",
)  # fmt: skip
# Of runs that are disturbed: how they save, and whether they have snapshots.
_SAVES, _SNAPSHOTS = ("on", "on", "off"), (None, None, 1, 3)
_PAUSE_SECONDS = (0.3, 1.5)
# Of faults: those that end processes, and of those, that come while a run recovers from another; and others, each time
# that one could come.
_HARD, _SECOND, _SOFT = 0.85, 0.2, 0.4


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


def numbers(folder: Path) -> dict[int, set[tuple[Any, ...]]]:
    """Loss, norm of the gradient and tokens so far, of each step, as often as it was recorded."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "train":
            found.setdefault(line["step"], set()).add((line["loss"], line["grad_norm"], line["tokens_seen"]))
    return found


def differences(folder: Path, reference: Path, steps: int) -> tuple[list[str], list[int]]:
    """What is not as in the run without faults, one line each; and steps of which there is no record. Rank 0 keeps
    records in memory while the disk is full, and may be killed; tokens so far of the next step say whether one was
    left out."""
    found, expected = tensors(folder, steps), tensors(reference, steps)
    wrong = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
    took, wanted = numbers(folder), numbers(reference)
    wrong += [f"step {step}: {took[step]}, not {wanted.get(step)}" for step in took if took[step] != wanted.get(step)]
    return wrong, sorted(wanted.keys() - took.keys())


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


def disturb(run: Run, faults: Faults | None, until: float, patience: float) -> tuple[bool, float]:
    """Let faults come until the run has ended, or the time is over. (Whether it hung, the longest pause.)"""
    latest, since, longest, again, after, quiet, second = run.step(), time.monotonic(), 0.0, 0, 0.0, 1, False
    while not run.done():
        run.revive()
        now, step = time.monotonic(), run.step()
        if step != latest:
            longest, latest, since, quiet = max(longest, now - since), step, now, 1
        if now - since > patience:
            return True, now - since
        if faults is not None:
            faults.tend()
            recovers = step < again or step <= SAVE_STEPS
            if now > until:
                faults.settle()
            elif now > after:
                after = now + faults.chance.uniform(*_PAUSE_SECONDS)
                if (second or not recovers) and faults.chance.random() < _HARD:
                    struck = faults.add(True) or faults.add(True)
                    if struck:
                        second = not second and faults.chance.random() < _SECOND
                        again = run.step() + faults.chance.randint(1, 2 * SAVE_STEPS)
                        after = time.monotonic() + faults.chance.uniform(0.0, 15.0 if second else 1.0)
                elif quiet and faults.chance.random() < _SOFT:
                    # A run that takes no steps is not stopped again and again.
                    quiet -= faults.add(False)
        time.sleep(0.05)
    if faults is not None:
        faults.settle()
    end = time.monotonic() + patience
    while any(agent.poll() is None for agent in run.agents) and time.monotonic() < end:
        time.sleep(0.2)
    return time.monotonic() > end, longest


def _say(text: str) -> None:
    print(text, flush=True)


def soak(
    folder: Path,
    minutes: float,
    steps: int,
    seed: int,
    patience: float,
    logs: Path | None = None,
    forks: bool = True,
    reference: Path | None = None,
) -> dict[str, Any]:
    """Runs with faults for so long, and what came of them.

    Args:
        logs: a folder that gets what agents wrote.
        forks: processes are forked; else they are started.
        reference: a folder that keeps the run without faults, for further soaks of the same code and steps."""
    chance, settings = random.Random(seed), (*SETTINGS, f"data.cache_dir={folder / 'cache'}")
    _say(f"seed {seed}: {minutes:g} minutes, runs of {steps} steps, processes {'forked' if forks else 'started'}")
    kept = reference or folder / "reference"
    whole, imported = kept / "run", kept / "imported"
    if not imported.exists():
        kept.mkdir(parents=True)
        variables = {IMPORTED: str(kept / "importing"), "CARPOOL_PLUGINS": "tools.imported"}
        run = Run(whole, kept / "run.log", settings, steps, None, variables)
        try:
            hung, _ = disturb(run, None, 0.0, patience)
        finally:
            run.end()
        if hung:
            raise SystemExit(f"the run without faults takes no steps:\n{run.log.read_text()[-3000:]}")
        (kept / "importing").rename(imported)
    server = None
    if forks:
        import_all(list(dict.fromkeys(imported.read_text().split())))
        server = Server()
    until = time.monotonic() + 60 * minutes
    counts, missed, ended = Counter[str](), Counter[str](), Counter[int]()
    rounds, hangs, wrong, longest, recoveries, unrecorded = 0, 0, list[str](), 0.0, list[dict[str, Any]](), 0
    while time.monotonic() < until and not hangs:
        with own_disk(folder / f"disk{rounds}") as disk:
            saves, window = chance.choice(_SAVES), chance.choice(_SNAPSHOTS)
            more = [f"training.async_save={saves}", *([] if window is None else [f"snapshots.window={window}"])]
            _say(f"run {rounds}: {' '.join(more)}")
            path = folder / f"disk{rounds}" / "run"
            run = Run(path, folder / f"run{rounds}.log", [*settings, *more], steps, server)
            faults = Faults(run, chance, disk, saves == "on", window is not None, _say)
            try:
                hung, pause = disturb(run, faults, until, patience)
            finally:
                run.end()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run.log, logs / f"seed{seed}-run{rounds}.log")
            rounds, hangs, longest = rounds + 1, hangs + hung, max(longest, pause)
            counts, missed, ended = counts + faults.counts, missed + faults.missed, ended + run.ended
            if hung:
                wrong.append(f"hung after step {run.step()}:\n{run.log.read_text(errors='replace')[-6000:]}")
                continue
            found, missing = differences(run.folder, whole, steps)
            wrong += [f"run {rounds - 1}: {one}" for one in found]
            unrecorded += len(missing)
            lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
            recoveries += [line for line in lines if line["kind"] == "recovery"]
            _say(
                f"  {faults.counts.total()} faults, longest pause {pause:.0f} s; {len(found)} differences {found[:20]}"
            )
    return {
        "seeds": [seed],
        "faults": counts.total(),
        "by_kind": dict(counts.most_common()),
        "did_not_strike": dict(missed),
        "runs": rounds,
        "steps": steps * rounds,
        "tensors": len(tensors(whole, steps)) * rounds,
        "steps_without_record": unrecorded,
        "hangs": hangs,
        "longest_pause_seconds": longest,
        "agents_ended": {str(code): count for code, count in ended.items()},
        "recoveries": len(recoveries),
        "recovery_seconds": {
            key: sorted(one[key] for one in recoveries)[len(recoveries) // 2]
            for key in ("regroup", "imports", "build", "load", "first_step")
            if recoveries
        },
        "wrong": wrong,
    }


def together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of several soaks."""
    total: dict[str, Any] = {}
    for key in ("seeds", "faults", "runs", "steps", "steps_without_record", "tensors", "hangs", "recoveries", "wrong"):
        total[key] = sum((one.get(key, 0) for one in found), type(found[-1][key])())
    for key in ("by_kind", "did_not_strike", "agents_ended"):
        total[key] = dict(sum((Counter(one[key]) for one in found), Counter[str]()).most_common())
    return {**total, "longest_pause_seconds": max(one["longest_pause_seconds"] for one in found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without a step that are a hang")
    parser.add_argument("--start", action="store_true", help="start processes instead of forking them")
    parser.add_argument(
        "--reference", type=Path, help="a folder that keeps the run without faults, for further soaks of as many steps"
    )
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    parser.add_argument("--logs", type=Path, help="a folder that gets what the agents of each run wrote")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="OUT", help="print the sum of soaks, from their --out")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left
    if given.sum:
        found = together([json.loads(path.read_text()) for path in given.sum])
    else:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))  # a `TemporaryDirectory` goes with any process that is forked
        try:
            found = soak(
                folder, given.minutes, given.steps, given.seed, given.patience, given.logs, not given.start,
                given.reference,
            )  # fmt: skip
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(found, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    return int(bool(found["wrong"] or found["hangs"]))


if __name__ == "__main__":
    raise SystemExit(main())
