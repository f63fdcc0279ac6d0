"""The processes of a run that is disturbed, and what is done to them: the faults of `tools.soak`.

Each kind says how it is known to have struck, or None where it did not: what it needs was not there.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from carpool.train.checkpoints.checkpoint_files import CheckpointError, check_files, file_record, read_state
from carpool.train.checkpoints.manager import CheckpointManager, checkpoint_name
from carpool_systems.sparse_snapshots import SnapshotFiles
from tools.forking import RANK, ForkedPopen, Server

ROOT = Path(__file__).parents[1]
AGENTS, SAVE_STEPS = 4, 5
_WORKER, _WRITER = "carpool.train.launch.worker", "shard_writer.py"
# Of processes that are stopped: for a while, and until others miss them; and of a full disk.
_SHORT_SECONDS, _LONG_SECONDS, _FULL_SECONDS = (0.2, 4.0), (9.0, 25.0), (0.5, 4.0)
# For a writer to appear, and for a signal to have its effect.
_LOOK_SECONDS, _EFFECT_SECONDS = 3.0, 20.0


def state_of(pid: int) -> str:
    """The letter of a process's state; "": it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) in ("R", "S", "D")


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def rank_number(pid: int) -> int | None:
    """Of a rank; None: another process."""
    name = _read(pid, "comm").strip()
    if name.startswith(RANK):
        return int(name.removeprefix(RANK))
    if _WORKER not in _read(pid, "cmdline"):
        return None
    ranks = [one[5:] for one in _read(pid, "environ").split("\0") if one.startswith("RANK=")]
    return int(ranks[0]) if ranks else None


class Run:
    """The agents of one run, which are started again when they end.

    Args:
        server: that forks them; None: they are started.
        env: further variables.
    """

    def __init__(
        self, folder: Path, log: Path, settings: Sequence[str], steps: int, server: Server | None,
        env: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.log, self.steps, self._server = folder, log, steps, server
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        more = [f"training.max_steps={steps}", f"training.output_dir={folder}"]
        self.command = [sys.executable, "-m", "carpool", "train", "--elastic", f"{AGENTS}:{AGENTS}", *settings, *more]
        self.ended = Counter[int]()
        self.agents: list[subprocess.Popen[bytes]] = [self._start() for _ in range(AGENTS)]

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            given: Any = {"stdout": log, "stderr": log, "cwd": ROOT, "env": self._env}
            if self._server is not None:
                return ForkedPopen(self._server, self.command, **given)
            return subprocess.Popen(self.command, **given)

    def done(self) -> bool:
        """Whether it came to its end, and all of that is on the disk."""
        last = self.folder / "checkpoints" / checkpoint_name(self.steps)
        return (self.folder / "summary.json").exists() and last.is_dir()

    def revive(self) -> None:
        """Start agents that have ended before the run has; their codes are counted."""
        for place, agent in enumerate(self.agents):
            if agent.poll() is not None and not self.done():
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

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for agent in self.agents:
            for pid in children(agent.pid):
                number = rank_number(pid)
                if number is not None and is_alive(pid):
                    found[number] = pid
        return found

    def writers(self) -> list[int]:
        """Processes that write a checkpoint beside training."""
        pids = [one for rank in self.ranks().values() for one in children(rank)]
        return [one for one in pids if _WRITER in _read(one, "cmdline") and is_alive(one)]

    def newest(self) -> Path | None:
        """The newest checkpoint, by its name and sequence alone."""
        return next(reversed(CheckpointManager(self.folder).list()), None)

    def end(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
                agent.kill()
            agent.wait()


class Faults:
    """What is done to a run, at random.

    Args:
        disk: it has one of its own.
        beside: it writes checkpoints beside training.
        snapshots: it has them.
        say: gets a line for each fault.

    Attributes:
        counts: faults that struck, by kind.
        missed: those that were drawn and did not, by kind.
    """

    def __init__(
        self, run: Run, chance: random.Random, disk: bool, beside: bool, snapshots: bool, say: Callable[[str], None]
    ) -> None:
        self.run, self.chance, self._say = run, chance, say
        self.counts, self.missed = Counter[str](), Counter[str]()
        self._later: list[tuple[float, Callable[[], object]]] = []
        self.hard: dict[str, Callable[[], str | None]] = {
            "rank killed": lambda: self._kill(self._any(self.run.ranks().values())),
            "rank killed that saves": self.kill_saving,
            "rank stopped for good": lambda: self._stop(self._any(self.run.ranks().values())),
            "agent killed": lambda: self._kill(self.chance.choice(self.run.agents).pid),
            "node killed": self.kill_node,
            "all agents killed": lambda: self._kill(*(one.pid for one in self.run.agents)),
            "agent asked to leave": self.ask_agent,
            **{kind: partial(self.damage, how) for kind, how in DAMAGE.items()},
        }  # fmt: skip
        self.soft: dict[str, Callable[[], str | None]] = {
            "rank paused": lambda: self._pause(self._any(self.run.ranks().values())),
            "agent paused": lambda: self._pause(self.chance.choice(self.run.agents).pid),
        }
        if beside:
            self.soft["writer paused"] = lambda: self._pause(self._writer())
            self.hard["writer killed"] = lambda: self._kill(self._writer())
            self.hard["writer stopped for good"] = lambda: self._stop(self._writer())
        if disk:
            self.soft["disk full"] = self.fill_disk
        if snapshots:
            self.hard["node's snapshots lost"] = self.lose_snapshots

    def add(self, hard: bool) -> bool:
        """One fault, if what it needs is there; whether it was."""
        kinds = self.hard if hard else self.soft
        # Those that have struck less often come rather.
        (kind,) = self.chance.choices(list(kinds), [1 / (1 + self.counts[one]) ** 2 for one in kinds])
        step, found = self.run.step(), None
        with suppress(ProcessLookupError, FileNotFoundError, CheckpointError):
            found = kinds[kind]()
        (self.missed if found is None else self.counts)[kind] += 1
        if found is not None:
            self._say(f"  {time.strftime('%H:%M:%S')} step {step}: {kind}: {found}")
        return found is not None

    def tend(self) -> None:
        """What was put off: continue stopped processes, empty the disk."""
        now = time.monotonic()
        due, self._later = [one for one in self._later if one[0] <= now], [one for one in self._later if one[0] > now]
        for _, act in due:
            with suppress(ProcessLookupError, FileNotFoundError):
                act()

    def settle(self) -> None:
        self._later = [(0.0, act) for _, act in self._later]
        self.tend()

    def _after(self, seconds: tuple[float, float], act: Callable[[], object]) -> float:
        pause = self.chance.uniform(*seconds)
        self._later.append((time.monotonic() + pause, act))
        return pause

    def _any(self, pids: Any) -> int | None:
        found = sorted(pids)
        return self.chance.choice(found) if found else None

    def _writer(self) -> int | None:
        end = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < end:
            if found := self.run.writers():
                return self.chance.choice(found)
            time.sleep(0.002)
        return None

    def _kill(self, *pids: int | None) -> str | None:
        """All of those that live, at once."""
        alive = [pid for pid in pids if pid is not None and is_alive(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return self._until(alive, ("", "Z", "X"), "was alive, and is gone")

    def _stop(self, pid: int | None) -> str | None:
        if pid is None or not is_alive(pid):
            return None
        os.kill(pid, signal.SIGSTOP)
        return self._until([pid], ("T",), "was alive, and stands still")

    def _until(self, pids: Sequence[int], states: Sequence[str], what: str) -> str | None:
        end = time.monotonic() + _EFFECT_SECONDS
        while pids and time.monotonic() < end:
            if all(state_of(pid) in states for pid in pids):
                return f"{', '.join(map(str, pids))} {what}"
            time.sleep(0.002)
        return None

    def _pause(self, pid: int | None) -> str | None:
        if pid is None or (found := self._stop(pid)) is None:
            return None
        seconds = _LONG_SECONDS if self.chance.random() < 0.25 else _SHORT_SECONDS
        return f"{found} for {self._after(seconds, lambda: os.kill(pid, signal.SIGCONT)):.1f} s"

    def kill_saving(self) -> str | None:
        """Rank 0, while a checkpoint is written."""
        end = time.monotonic() + _LOOK_SECONDS
        while (pid := self.run.ranks().get(0)) is not None and time.monotonic() < end:
            while is_alive(pid) and time.monotonic() < end:
                if half := list((self.run.folder / "checkpoints").glob(".tmp-step-*")):
                    if (killed := self._kill(pid)) and half[0].exists():
                        return f"{killed}, and {half[0].name} is half"
                    return None if killed is None else f"{killed}, while it saved"
                time.sleep(0.001)
        return None

    def kill_node(self) -> str | None:
        agent = self.chance.choice(self.run.agents).pid
        below = children(agent)
        return self._kill(agent, *below, *(one for pid in below for one in children(pid)))

    def lose_snapshots(self) -> str | None:
        """A node is killed, and nothing is left of what its memory held: its snapshots, and its peer's."""
        node = self.chance.choice(self.run.agents).pid
        number = next((found for pid in children(node) if (found := rank_number(pid)) is not None), None)
        home = SnapshotFiles(self.run.folder, None, 0).home  # type: ignore[arg-type]
        if number is None:
            return None
        lost = [home / f"rank-{number:05d}", home / "of-peers" / f"rank-{(number - 1) % AGENTS:05d}"]
        count = sum(len(list(one.glob("step-*"))) for one in lost)
        if not count or (killed := self._kill(node, *children(node))) is None:
            return None
        for one in lost:
            shutil.rmtree(one, ignore_errors=True)
        return f"{killed}; {count} snapshots of ranks {number} and {(number - 1) % AGENTS} are gone"

    def ask_agent(self) -> str | None:
        agent = self.chance.choice(self.run.agents)
        if not is_alive(agent.pid):
            return None
        agent.send_signal(signal.SIGTERM)
        end = time.monotonic() + _EFFECT_SECONDS
        while agent.poll() is None and time.monotonic() < end:
            self.tend()
            time.sleep(0.05)
        return None if agent.returncode is None else f"agent {agent.pid} was alive, and left with {agent.returncode}"

    def damage(self, spoil: Callable[[Path], object]) -> str | None:
        """All ranks are killed; then a file of the newest checkpoint is damaged, where an older one is there."""
        whole = [one for one in CheckpointManager(self.run.folder).list() if not is_damaged(one)]
        ranks = self.run.ranks().values()
        if len(whole) < 2 or not ranks or (killed := self._kill(*ranks)) is None:
            return None
        newest = self.run.newest()
        assert newest is not None
        path = self.chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        spoil(path)
        return f"{killed}; {newest.name}/{path.relative_to(newest)} is damaged" if is_damaged(newest) else None

    def fill_disk(self) -> str | None:
        path, why, size = self.run.folder.parent / f"filler-{self.chance.random()}", 0, 0
        with path.open("wb", buffering=0) as file:
            while not why:
                try:
                    size += file.write(bytes(1 << 16))
                except OSError as error:
                    why = error.errno or 0
        if not size:  # another one fills it
            path.unlink()
            return None
        seconds = self._after(_FULL_SECONDS, path.unlink)
        return f"{os.strerror(why)} after {size >> 20} MiB, for {seconds:.1f} s" if why == errno.ENOSPC else None


def _spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "file cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "file spoilt": _spoil,
    "file deleted": Path.unlink,
}


def is_damaged(checkpoint: Path) -> bool:
    """Whether its files are not as its `state.json` says, or that is not as it says itself."""
    try:
        files = read_state(checkpoint)["files"]
        check_files(checkpoint, files, mine=[])
        return any(file_record(checkpoint / name) != record for name, record in files.items())
    except CheckpointError:
        return True
