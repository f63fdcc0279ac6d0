"""A checkpoint that is written while training goes on: a thread on each rank sees it through.

    main thread      begin | step n+1: forward, backward | settle | update | step n+2 ............... | collect
    thread           copies to host memory ...............|  waits for the writer ....  report | rank 0: publish
    writer process                                        |  writes, sums, flushes ..|

No rank waits for another on the way, and no collective is needed: the thread of each rank leaves a report in the
process group's store when its files are on the disk, or why they are not. The thread of rank 0 waits for all reports,
completes `state.json`, and gives the folder its name. So the rename comes after every file of every rank, as in a save
that training waits for, and a run that dies before it leaves a folder that nobody takes for a checkpoint. Reports are
not files: a disk that is full has no room for the news of it.

DCP's own saver in another process (`async_save` with `AsyncCheckpointerType.PROCESS`) is not used. It was read in
torch 2.13: each rank's process imports PyTorch and joins a gloo group of its own on another port, in which it waits up
to 30 minutes for a writer that is gone; tensors go to it by one file descriptor each, which at thousands of tensors is
over the usual limit of 1,024; its file writer builds a whole file as one `bytes`; and it keeps pickles. Here DCP plans
and reads, and the process that writes needs neither PyTorch nor a group.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from carpool.parallel.ranks import FREE_SPACE, describe, rank, together, world
from carpool.train.checkpoints import shard_writer
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.host_copy import HostBuffer, copy_files
from carpool.train.checkpoints.shard_files import ShardFile
from carpool.train.checkpoints.state_tensors import rng_state

_PAUSE_SECONDS = 0.05
Reports = list[dict[str, Any]]


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is whole.

    Attributes:
        bytes: its size over all ranks.
        seconds: that training waited for it, on rank 0.
        copied, written: seconds beside training: until the state was copied, and until all was in place. None: training
            waited for all of it.
    """

    step: int
    path: Path
    bytes: int
    seconds: float
    copied: float | None = None
    written: float | None = None


@dataclass
class OpenedSave:
    """A checkpoint before its tensors are written. `files`: of this rank, by name inside the folder; `disk_full`: what
    to do about a full disk."""

    step: int
    temporary: Path
    final: Path
    state: dict[str, Any]
    disk_full: str = FREE_SPACE
    files: dict[str, ShardFile] = field(default_factory=dict)

    @property
    def doing(self) -> str:
        """How an error begins."""
        return f"checkpoint {self.final} was not written, earlier ones are untouched: "

    def together(self) -> AbstractContextManager[None]:
        """As `carpool.parallel.ranks.together`, for a part of the writing."""
        return together(CheckpointWriteError, self.doing, self.disk_full)


class PendingSave:
    """See the module's docstring. Of this rank; constructed where no update is under way.

    Args:
        store: of the process group, for threads; None: there is one rank.
        publish: makes the folder a checkpoint, by the reports of all ranks; its bytes. It may raise OSError.
        started: when training began to wait (`time.perf_counter`).
        stall_seconds: after which a writer that writes nothing is ended.

    Attributes:
        failure: why this rank could not do its part; None: it could, or is not done.
        waited: seconds that training has waited so far.
        announced: for whoever tells the user.
    """

    def __init__(
        self, opened: OpenedSave, buffer: HostBuffer, store: Any, publish: Callable[[Reports], int], started: float,
        stall_seconds: float,
    ) -> None:  # fmt: skip
        self.opened, self._buffer, self._store, self._publish = opened, buffer, store, publish
        self._stall_seconds = stall_seconds
        self.failure: OSError | None = None
        self.announced = False
        self._failed_elsewhere = ""
        self._begun, self._rng = time.perf_counter(), rng_state()
        self._copied, self._copy_seconds, self._bytes, self._seconds = threading.Event(), 0.0, 0, 0.0
        cuda = any(one.tensor.is_cuda for file in opened.files.values() for one in file.placed)
        self._stream = torch.cuda.Stream() if cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._see_through, name="carpool-checkpoint", daemon=True)
        self._thread.start()
        self.waited = time.perf_counter() - started

    @property
    def path(self) -> Path:
        """Of the checkpoint, once it is one."""
        return self.opened.final

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do; rank 0: whether there is a checkpoint, or an `error`."""
        return not self._thread.is_alive()

    @property
    def error(self) -> str:
        """Why there is no checkpoint, as far as this rank knows; rank 0 knows of all."""
        if self.failure is not None:
            return f"rank {rank()}: {self.failure}" if world() > 1 else str(self.failure)
        return self._failed_elsewhere

    def settle(self) -> None:
        """As `CheckpointManager.settle`."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.waited += time.perf_counter() - started

    def join(self, seconds: float | None = None) -> None:
        """Wait until `done`, so long at most."""
        started = time.perf_counter()
        self._thread.join(seconds)
        self.waited += time.perf_counter() - started

    def saved(self) -> SavedCheckpoint:
        """What has become of it. On rank 0, once it is `done` without `error`."""
        return SavedCheckpoint(self.opened.step, self.path, self._bytes, self.waited, self._copy_seconds, self._seconds)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _see_through(self) -> None:
        try:
            report: dict[str, Any] = {"files": self._copy_and_write(), "rng": self._rng}
        except Exception as error:  # of memory, of CUDA, of the disk: people read what it is
            self.failure = OSError(describe(error, self.opened.disk_full) or type(error).__name__)
            report = {"error": str(self.failure)}
        finally:
            self._copied.set()
            self.opened.files.clear()
        try:
            if (reports := self._exchange(report)) is not None:
                self._bytes = self._publish(reports)
        except Exception as error:
            self.failure = self.failure or OSError(describe(error, self.opened.disk_full) or type(error).__name__)
        self._seconds = time.perf_counter() - self._begun

    def _copy_and_write(self) -> dict[str, Any]:
        """The records of this rank's files, by name."""
        folder, files = self.opened.temporary, self.opened.files
        with torch.cuda.device(self._stream.device) if self._stream is not None else nullcontext():
            starts = copy_files(files, self._buffer, self._stream)
        self._copy_seconds = time.perf_counter() - self._begun
        wanted = {str(folder / name): (starts[name], file.bytes) for name, file in files.items()}
        files.clear()
        self._copied.set()
        # There may be more ranks than tensors.
        records = write_beside(wanted, self._buffer.fd, self._stall_seconds) if wanted else {}
        return {os.path.relpath(path, folder): one for path, one in records.items()}

    def _exchange(self, report: dict[str, Any]) -> Reports | None:
        """On rank 0 the reports of all ranks, once they are there; None: on others, or if a rank has failed."""
        if self._store is None:
            return [report] if "error" not in report else None
        keys = [f"carpool/{self.opened.temporary.name}/{number}" for number in range(world())]
        self._store.set(keys[rank()], json.dumps(report))
        if rank() != 0:
            return None
        while not self._store.check(keys):
            time.sleep(_PAUSE_SECONDS)
        reports = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        failed = [f"rank {number}: {one['error']}" for number, one in enumerate(reports) if "error" in one]
        self._failed_elsewhere = "; ".join(failed)
        if failed:
            shutil.rmtree(self.opened.temporary, ignore_errors=True)
        return None if failed else reports


def write_beside(files: dict[str, tuple[int, int]], memory: int, stall_seconds: float) -> dict[str, Any]:
    """Write files in a process of its own, at a lower priority, and wait for it: their records, by path.

    Args:
        files: by path, first byte and bytes in the memory.
        memory: a file descriptor of shared memory.
        stall_seconds: after which the process is killed if no file grows: it stands still, or the disk does.

    Raises:
        OSError: what could not be written, or that the process has died or was killed.
    """
    job = json.dumps({"parent": os.getpid(), "memory": memory, "files": files})
    command, pipe = [sys.executable, "-I", "-S", shard_writer.__file__], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pass_fds=[memory]) as process:
        size, given = 0, f"{job}\n"
        while True:
            try:
                said, errors = process.communicate(given, timeout=stall_seconds)
                break
            except subprocess.TimeoutExpired:
                before, size, given = size, sum(os.path.getsize(path) for path in files if os.path.exists(path)), ""
                if size == before:
                    process.kill()
                    raise OSError(f"the process that writes it wrote nothing for {stall_seconds:.0f} s") from None
    try:
        answer = json.loads(said)
    except ValueError:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise OSError(f"the process that writes it ended with code {process.returncode}: {last}") from None
    if "error" in answer:
        raise OSError(*answer["error"])
    records: dict[str, Any] = answer["records"]
    return records
