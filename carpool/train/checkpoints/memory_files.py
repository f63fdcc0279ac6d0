"""Files in /dev/shm, memory that outlives the process but not the machine.

    /dev/shm/carpool-snapshots-UID/HASH-OF-THE-RUN-FOLDER/...    step-00000012.safetensors

A file gets its name when it is whole. Who removes them: the run when it ends or when it starts from the beginning (no
training.resume_from_checkpoint), and any start of a run that finds folders of runs whose own folder is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from carpool.train.checkpoints.host_copy import HostBuffer

MEMORY = Path("/dev/shm")
# Bytes of a file for numbers that grow.
ROOM = 1 << 20


class MemoryFiles:
    """Files of one folder, one for each step. Those of one size are reused in turn: each is page-locked once.

    Args:
        device: that has the tensors.
        folder: inside the run's folder in memory.
    """

    def __init__(self, run: Path, device: torch.device, folder: str) -> None:
        self.run, self._device = run.absolute(), device
        users = MEMORY / f"carpool-snapshots-{os.getuid()}"
        self.home = users / hashlib.sha256(str(self.run).encode()).hexdigest()[:16]
        self.folder = self.home / folder
        self._buffers: dict[Path, HostBuffer] = {}

    def clean(self, everything: bool) -> None:
        """Remove files of runs whose folder is gone, of this user; with `everything`, this run's on this host, too."""
        for owner in self.home.parent.glob("*/run"):
            with suppress(FileNotFoundError):  # another rank removes them, too
                if not Path(owner.read_text()).is_dir():
                    shutil.rmtree(owner.parent, ignore_errors=True)
        if everything:
            for buffer in self._buffers.values():
                buffer.close()
            self._buffers.clear()
            shutil.rmtree(self.home, ignore_errors=True)

    def path(self, step: int) -> Path:
        """Of the snapshot of a step."""
        return self.folder / f"step-{step:08d}.safetensors"

    def about(self, step: int) -> dict[str, Any]:
        """What a snapshot says beside tensors."""
        with safe_open(self.path(step), "pt") as stored:
            found: dict[str, Any] = json.loads(stored.metadata()["snapshot"])
        return found

    def turn(self, step: int, number: int, size: int) -> HostBuffer:
        """Memory for the snapshot of a step, which has no name yet. Of `number` files the oldest goes, and those of
        later steps: a run that was rolled back, or goes on, takes them again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.home / "run").write_text(str(self.run))
        new, there = self.folder / "new", sorted(self.folder.glob("step-*"))
        while there and there[-1] > self.path(step):
            self._forget(there.pop())
        old = self.path(step) if self.path(step) in there else there[0] if len(there) >= number else new
        if old.exists() and old.stat().st_size != size:
            self._forget(old)
        buffer = self._buffers.pop(old, None)
        if old.exists():
            old.rename(new)
        if buffer is None:
            buffer = HostBuffer(self._device, new)
            buffer.reserve(size)
        return buffer

    def name(self, step: int, buffer: HostBuffer) -> None:
        """Its content is whole."""
        (self.folder / "new").rename(self.path(step))
        self._buffers[self.path(step)] = buffer

    def _forget(self, path: Path) -> None:
        if (buffer := self._buffers.pop(path, None)) is not None:
            buffer.close()
        path.unlink()


def check_room(home: Path, needed: int, what: str, instead: str) -> None:
    """Raise ValueError where there is no room for files of so many bytes in place of those that are there."""
    disk = os.statvfs(MEMORY)
    there = sum(path.stat().st_blocks * 512 for path in home.rglob("*.safetensors"))
    if needed > (free := disk.f_bavail * disk.f_frsize + there):
        raise ValueError(
            f"{what} need {needed / 1e9:.2f} GB in {MEMORY}, and {free / 1e9:.2f} GB are free: enlarge it (of a "
            f"container: --shm-size), or {instead}"
        )
