"""Writing checkpoints: all that a run needs to go on as if it had not been interrupted, on these ranks or on others.

Saved are the model, the optimizer's state, the loader's position and the random generators, through PyTorch's
distributed checkpointing: each rank writes its own parts, and a reader on any other number of ranks picks from all
parts what it needs. Experts are in logical order, whatever the layout of the run. On the same ranks a resumed run
repeats the uninterrupted one bit by bit; on others, up to the order of floating-point sums.

What can go wrong while saving, and why the last good checkpoint survives it:

    a rank or a writer is   the folder still has its temporary name, nobody takes it for a checkpoint, and the next
    killed                  save removes it
    a disk is full          all ranks first say whether their writes went well; if one did not, all raise the same
                            error, which names it, and the temporary folder goes away
    power fails             files and folders are flushed to the disk before the folder gets its name
    the save is done        one rename, by rank 0, makes it a checkpoint; only then are old ones removed

`carpool.train.checkpoints.reading` reads them; `carpool.train.checkpoints.checkpoint_files` has the format.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carpool.activations.host_memory import SHARE, free_host_memory
from carpool.hf.seam.moved_experts import is_logical, logical_order
from carpool.optim.update import local
from carpool.parallel.ranks import FREE_SPACE, gather, patiently, rank, together, world
from carpool.train.checkpoints.checkpoint_files import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    STATE_FILE,
    CheckpointError,
    CheckpointWriteError,
    check_files,
    file_record,
    flush_file,
    flush_folder,
    put_in_place,
    read_state,
    write_state,
)
from carpool.train.checkpoints.host_copy import HostBuffer
from carpool.train.checkpoints.pending_save import OpenedSave, PendingSave, Reports, SavedCheckpoint
from carpool.train.checkpoints.shard_files import ShardFile, ShardPlanner, total_bytes
from carpool.train.checkpoints.state_tensors import (
    Tensors,
    as_rectangles,
    average_tensors,
    model_tensors,
    optimizer_tensors,
    rng_state,
)

logger = logging.getLogger(__name__)
# `list` is a method below.
Paths = list[Path]
Ordered = list[tuple[int, Path]]
Waits = list[Callable[[], None]]


class CheckpointManager:
    """The checkpoints of one run, in `output_dir/checkpoints`, a folder that all ranks see.

    Args:
        save_total_limit: how many checkpoints are kept; None keeps all.
        stall_seconds: after which a writer beside training that writes nothing is ended.

    Raises:
        ValueError: if `save_total_limit` is less than 1.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], save_total_limit: int | None = None, stall_seconds: float = 600.0
    ) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise ValueError(f"save_total_limit is {save_total_limit}, but at least one checkpoint must be kept")
        self.folder = Path(output_dir) / "checkpoints"
        self.save_total_limit, self._stall_seconds = save_total_limit, stall_seconds
        # A step whose checkpoint is kept, whatever its age.
        self.best: int | None = None
        # Being written; `collect` waits for it.
        self.pending: PendingSave | None = None
        self.copying: Waits = []
        self._planner = ShardPlanner()
        self._buffer: HostBuffer | None = None
        self._store: Any = None

    def list(self) -> Paths:
        """Complete checkpoints in the order in which they were saved, the newest last.

        That is the order of their steps, unless a run was resumed from a checkpoint before the last one: then those
        from before the rewind come first, whatever their step.
        """
        return [path for _, path in sorted(self._ordered())]

    def has(self, step: int | None) -> bool:
        """Whether there is a checkpoint of this step."""
        return step is not None and (self.folder / checkpoint_name(step) / STATE_FILE).is_file()

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all there in full size, or None. (`load` also checks their content.)"""
        for path in reversed(self.list()):
            try:
                check_files(path, read_state(path)["files"], mine=[])
                return path
            except CheckpointError as error:
                logger.warning("a checkpoint is passed over: %s", error)
        return None

    def why_damaged(self) -> tuple[str, ...]:
        """Of each checkpoint that `latest` passes over, the oldest first: what is wrong with it."""
        found = []
        for path in sorted(path for path in self.folder.glob("step-*") if step_of(path) is not None):
            try:
                check_files(path, read_state(path)["files"], mine=[])
            except CheckpointError as error:
                found.append(str(error))
        return tuple(found)

    def _ordered(self) -> Ordered:
        found: dict[str, Path] = {}
        # `.old-` is a checkpoint whose replacement under the same name was being put in place when the writer died.
        named = [path for path in self.folder.glob("step-*") if step_of(path) is not None]
        for path in [*self.folder.glob(".old-step-*"), *named]:
            if (path / STATE_FILE).is_file():
                found[_name(path)] = path
        ordered: Ordered = []
        for path in found.values():
            try:
                ordered.append((int(read_state(path)["sequence"]), path))
            except CheckpointError as error:
                logger.warning("a checkpoint is passed over: %s", error)
        return ordered

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        average: torch.optim.Optimizer | None = None,
        write_files: Callable[[Path], None] | None = None,
        beside: bool = False,
    ) -> SavedCheckpoint | None:
        """Writes a checkpoint. Every rank calls it, between an optimizer step and the next forward.

        Args:
            step: optimizer steps done so far.
            state: what else the run needs to go on, as JSON can hold it; the same on every rank. The random
                generators of each rank are saved besides.
            average: of the trained weights (`carpool.optim.ema`), if there is one.
            write_files: called on rank 0 with the folder: further files (.json, .npz) that a resumed run reads.
            beside: copy, write and put it in place while training goes on (`carpool.train.checkpoints.pending_save`),
                unless host memory lacks capacity for a copy. Before weights or the optimizer's state change, `settle`
                must have returned, and `collect` must be called before the next save.

        Returns:
            What was written; None: it is being written.

        Raises:
            CheckpointWriteError: on all ranks, if one of them could not write. Earlier checkpoints are untouched.
            ValueError: if `state` is not JSON, or not the same on all ranks; or one is being written.
        """
        started = time.perf_counter()
        opened = self._open(step, model, optimizer, average, state, write_files)
        if not beside or not self._has_room(opened.files):
            return self._write(opened, started)
        buffer = self._host_buffer(opened.files)
        if self._store is None and world() > 1:
            # A connection of the thread's own: a call may wait.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
        publish = partial(self._publish, opened)
        self.pending = PendingSave(opened, buffer, self._store, publish, started, self._stall_seconds)
        return None

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average: torch.optim.Optimizer | None = None,
    ) -> None:
        """Begin to reserve host memory for the copies of `save(beside=True)`, so that the first one does not wait
        for it; nothing where it lacks room. After the first update, when the optimizer has its state. Arguments as of
        `save`. Collective.

        Raises:
            CheckpointWriteError: on all ranks, if one cannot say what it would write."""
        doing = "host memory for checkpoints was not reserved: "
        parts = _parts(model, optimizer, average, doing)
        files: dict[str, ShardFile] = {}
        with ExitStack() as stack:
            with together(CheckpointWriteError, doing):  # DCP makes the folders that it plans for
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with together(CheckpointWriteError, doing):
                files = self._planner.shard_files(folder, parts)
        if self._has_room(files) and files:  # a rank may write nothing
            self._host_buffer(files).prepare(total_bytes(files))

    @property
    def preparing(self) -> bool:
        """Whether memory that `prepare` asked for is still being reserved on this rank."""
        return self._buffer is not None and self._buffer.preparing

    def _write(self, opened: OpenedSave, started: float) -> SavedCheckpoint:
        """Writes and publishes it while all ranks wait."""
        with self._whole_or_gone(opened):
            records: dict[str, dict[str, Any]] = {}
            with opened.together():
                records = {name: file.write(opened.temporary / name) for name, file in opened.files.items()}
            of_ranks = gather({"files": records, "rng": rng_state()})
            written = 0
            with opened.together():
                if rank() == 0:
                    written = self._publish(opened, of_ranks)
        return SavedCheckpoint(opened.step, opened.final, gather(written)[0], time.perf_counter() - started)

    def _host_buffer(self, files: Mapping[str, ShardFile]) -> HostBuffer:
        """For a copy of these."""
        if self._buffer is None:
            devices = {one.tensor.device for file in files.values() for one in file.placed}
            self._buffer = HostBuffer(next((one for one in devices if one.type == "cuda"), torch.device("cpu")))
        return self._buffer

    def _has_room(self, files: Mapping[str, ShardFile]) -> bool:
        """Whether the hosts of all ranks have memory for a copy of what they write. Collective."""
        needed = total_bytes(files) - (0 if self._buffer is None else self._buffer.bytes)
        of_ranks = gather((needed, free_host_memory(), socket.gethostname()))
        needs: dict[str, int] = {}
        for size, _, host in of_ranks:
            needs[host] = needs.get(host, 0) + max(0, size)
        return all(free is None or needs[host] <= SHARE * free for _, free, host in of_ranks)

    def settle(self) -> None:
        """Returns when weights and the optimizer's state may change: all copies of them that were begun are there, of a
        checkpoint that is being written and of plug-ins (`copying`). Not collective."""
        if self.pending is not None:
            self.pending.settle()
        for wait in self.copying:
            wait()

    def collect(self) -> SavedCheckpoint | None:
        """Waits until the checkpoint that is being written is whole, on all ranks; None: there is none. Collective.

        Raises:
            CheckpointWriteError: on all ranks, if one could not write. Earlier checkpoints are untouched."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        with patiently():  # writing may take longer than a collective
            pending.join()
        with self._whole_or_gone(pending.opened), pending.opened.together():
            if pending.failure is not None:
                raise pending.failure
        return gather(pending.saved())[0]

    def close(self, seconds: float = 0.0) -> None:
        """Waits for what is being written, so long at most, and gives back the memory of its copy. Not collective."""
        if self.pending is not None:
            self.pending.join(seconds)
        if self._buffer is not None and (self.pending is None or self.pending.done):
            self._buffer.close()

    def _open(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: torch.optim.Optimizer | None,
        state: dict[str, Any],
        write_files: Callable[[Path], None] | None,
    ) -> OpenedSave:
        """What is written, and a folder for it with the files that are not of tensors. Collective."""
        if self.pending is not None:
            raise ValueError(f"the checkpoint {self.pending.path} is still being written: collect() it first")
        self._check_state(state)
        final = self.folder / checkpoint_name(step)
        temporary = self.folder / f".tmp-{final.name}-{gather(secrets.token_hex(4))[0]}"
        # As it is now: training goes on with it, and it is written later.
        fewer = "" if self.save_total_limit == 1 else " or lower training.save_total_limit"
        opened = OpenedSave(step, temporary, final, json.loads(json.dumps(state)), FREE_SPACE + fewer)
        with self._whole_or_gone(opened):
            with opened.together():
                if rank() == 0:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clean_up()
                    for part in (MODEL, OPTIMIZER, *([] if average is None else [AVERAGE])):
                        (temporary / part).mkdir(parents=True)
            parts = _parts(model, optimizer, average, opened.doing)
            with opened.together():
                opened.files.update(self._planner.shard_files(temporary, parts))
            with opened.together():
                if rank() == 0:
                    _write_config(model, temporary / MODEL)
                    if write_files is not None:
                        write_files(temporary)
                        for path in temporary.glob("*.*"):
                            flush_file(path)
        return opened

    @contextmanager
    def _whole_or_gone(self, opened: OpenedSave) -> Iterator[None]:
        """Inside, a checkpoint that could not be written leaves no folder."""
        try:
            yield
        except CheckpointWriteError:
            if rank() == 0:
                shutil.rmtree(opened.temporary, ignore_errors=True)
            raise

    def _check_state(self, state: dict[str, Any]) -> None:
        encoded: dict[str, str] = {}
        with together(ValueError, "the state for the checkpoint cannot be written as JSON: "):
            encoded = {str(key): json.dumps(value, sort_keys=True) for key, value in state.items()}
        of_ranks = gather(encoded)
        first = of_ranks[0]
        for other_rank, other in enumerate(of_ranks):
            if differ := sorted(key for key in other.keys() | first.keys() if other.get(key) != first.get(key)):
                raise ValueError(
                    f"the state for the checkpoint must be the same on all ranks, but rank {other_rank} has another "
                    f"{', '.join(differ)} than rank 0"
                )

    def _publish(self, opened: OpenedSave, of_ranks: Reports) -> int:
        """Makes the folder a checkpoint, and removes old ones; the bytes of its files. On rank 0.

        Args:
            of_ranks: of each rank: "files", their sizes and sums by name, and "rng", of its generators.

        Raises:
            OSError: a rank's files are not to be seen here, or the folder cannot be completed."""
        temporary = opened.temporary
        files = {name: record for of_rank in of_ranks for name, record in of_rank["files"].items()}
        if unseen := sorted(name for name in files if not (temporary / name).is_file()):
            raise FileNotFoundError(
                f"rank 0 does not see {unseen[0]}, which another rank wrote; output_dir must be on a "
                "filesystem that all nodes share"
            )
        for path in sorted(temporary.rglob("*")):
            if path.suffix in (".json", ".npz"):
                files[str(path.relative_to(temporary))] = file_record(path)
        ranks = [{"rng": of_rank["rng"]} for of_rank in of_ranks]
        sequence = 1 + max((sequence for sequence, _ in self._ordered()), default=0)
        write_state(temporary, _content(opened.step, opened.state, files, ranks, sequence))
        for folder in (*filter(Path.is_dir, temporary.iterdir()), temporary):
            flush_folder(folder)
        put_in_place(temporary, opened.final)
        self._prune(keep=opened.final)
        return sum(record["bytes"] for record in files.values())

    def _clean_up(self) -> None:
        """Removes what killed writers left."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".old-*"):
            if (self.folder / _name(path)).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(self.folder / _name(path))

    def _prune(self, keep: Path) -> None:
        if self.save_total_limit is None:
            return
        others = [path for path in self.list() if path != keep]
        older = [path for path in others if step_of(path) != self.best]
        newest = max(0, self.save_total_limit - 1 - (len(others) - len(older)))
        for path in older[: len(older) - newest]:
            try:
                # Away under its name first: a writer that dies here leaves no half of a checkpoint.
                path = path.rename(self.folder / f".tmp-{path.name}-{secrets.token_hex(4)}")
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("an old checkpoint could not be removed: %s", error)


def checkpoint_name(step: int) -> str:
    """Of the folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None: another folder, such as a copy `step-00000100.bak`."""
    number = folder.name.removeprefix("step-")
    return int(number) if folder.name.startswith("step-") and number.isdecimal() else None


def _name(path: Path) -> str:
    """step-00000100, of that or of .old-step-00000100-1a2b3c4d."""
    return path.name if path.name.startswith("step-") else "-".join(path.name.removeprefix(".old-").split("-")[:2])


def _without_buffers(tensors: Tensors, model: nn.Module) -> Tensors:
    """The same tensors, with copies of buffers, which a forward may change; the rest changes in updates."""
    buffers = {buffer.data_ptr() for buffer in model.buffers()}
    return {name: one.clone() if local(one).data_ptr() in buffers else one for name, one in tensors.items()}


def _parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: torch.optim.Optimizer | None,
    doing: str,
) -> dict[str, Tensors]:
    """What a checkpoint holds, by the folder inside it. Collective. CheckpointWriteError: it begins with `doing`."""
    parts: dict[str, Tensors] = {}
    with together(CheckpointWriteError, doing):
        parts[MODEL] = _without_buffers(model_tensors(model), model)
        parts[OPTIMIZER] = optimizer_tensors(model, optimizer)
        if average is not None:
            parts[AVERAGE] = average_tensors(model, average)
        if not is_logical(model):
            parts = {part: logical_order(model, tensors) for part, tensors in parts.items()}
        parts = {part: as_rectangles(tensors) for part, tensors in parts.items()}
    return parts


def _write_config(model: nn.Module, folder: Path) -> None:
    """From these a reader knows what to build."""
    for name in ("config", "generation_config"):
        if save := getattr(getattr(model, name, None), "save_pretrained", None):
            save(folder)
    for path in folder.glob("*.json"):
        flush_file(path)


def _content(
    step: int, state: dict[str, Any], files: dict[str, Any], ranks: list[dict[str, Any]], sequence: int
) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("carpool", "transformers", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "step": step,
        "sequence": sequence,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "world_size": len(ranks),
        "state": state,
        "files": files,
        "ranks": ranks,
    }
