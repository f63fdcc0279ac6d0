"""Writing checkpoints: all that a run needs to go on as if it had not been interrupted, on these ranks or on others.

Saved are the model, the optimizer's state, the loader's position and the random generators, through PyTorch's
distributed checkpointing: each rank writes its own parts, and a reader on any other number of ranks picks from all
parts what it needs. Experts are in logical order, whatever the layout of the run. On the same ranks a resumed run
repeats the uninterrupted one bit by bit; on others, up to the order of floating-point sums.

What can go wrong while saving, and why the last good checkpoint survives it:

    a rank is killed        the folder still has its temporary name, nobody takes it for a checkpoint, and the next
                            save removes it
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
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from carpool.train.checkpoints.checkpoint_files import (
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
from carpool.train.checkpoints.state_tensors import (
    Hook,
    Tensors,
    as_rectangles,
    model_tensors,
    optimizer_tensors,
    rng_state,
)
from carpool.train.launch.ranks import gather, one_process_is_fine, rank, together

logger = logging.getLogger(__name__)
# `list` is a method below.
Paths = list[Path]
Ordered = list[tuple[int, Path]]


class SavedCheckpoint(NamedTuple):
    """Where a checkpoint is, its size over all ranks, and how long all ranks waited for it."""

    path: Path
    bytes: int
    seconds: float


class CheckpointManager:
    """The checkpoints of one run, in `output_dir/checkpoints`, a folder that all ranks see.

    Args:
        output_dir: the run's folder.
        save_total_limit: how many checkpoints are kept; None keeps all.

    Raises:
        ValueError: if `save_total_limit` is less than 1.
    """

    def __init__(self, output_dir: str | os.PathLike[str], save_total_limit: int | None = None) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise ValueError(f"save_total_limit is {save_total_limit}, but at least one checkpoint must be kept")
        self.folder = Path(output_dir) / "checkpoints"
        self.save_total_limit = save_total_limit
        # A step whose checkpoint is kept, whatever its age.
        self.best: int | None = None

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
        to_logical: Hook | None = None,
        write_files: Callable[[Path], None] | None = None,
    ) -> SavedCheckpoint:
        """Writes a checkpoint. Every rank calls it, between an optimizer step and the next forward.

        Args:
            step: optimizer steps done so far.
            state: what else the run needs to go on, as JSON can hold it; the same on every rank. The random
                generators of each rank are saved besides.
            to_logical: called with the model's tensors by name, then with the optimizer's (`state.<name>.exp_avg`),
                all as the model has them; returns the same names with experts in logical order.
            write_files: called on rank 0 with the folder: further files (.json, .npz) that a resumed run reads.

        Raises:
            CheckpointWriteError: on all ranks, if one of them could not write. Earlier checkpoints are untouched.
            ValueError: if `state` is not JSON, or not the same on all ranks.
        """
        started = time.perf_counter()
        self._check_state(state)
        final = self.folder / checkpoint_name(step)
        temporary = self.folder / f".tmp-{final.name}-{gather(secrets.token_hex(4))[0]}"
        doing = f"checkpoint {final} was not written, earlier ones are untouched: "
        try:
            with together(CheckpointWriteError, doing):
                if rank() == 0:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clean_up()
                    (temporary / MODEL).mkdir(parents=True)
            parts: dict[str, Tensors] = {}
            with together(CheckpointWriteError, doing):
                parts[MODEL] = _converted(model_tensors(model), to_logical)
                parts[OPTIMIZER] = _converted(optimizer_tensors(model, optimizer), to_logical)
            with together(CheckpointWriteError, doing):
                for part, tensors in parts.items():
                    _write(temporary / part, tensors)
            records: dict[str, dict[str, Any]] = {}
            with together(CheckpointWriteError, doing):
                if rank() == 0:
                    _write_config(model, temporary / MODEL)
                    if write_files is not None:
                        write_files(temporary)
                        for path in temporary.glob("*.*"):
                            flush_file(path)
                records = _own_records(temporary)
            of_ranks = gather((records, rng_state()))
            files = {name: record for of_rank, _ in of_ranks for name, record in of_rank.items()}
            with together(CheckpointWriteError, doing):
                if rank() == 0:
                    if unseen := sorted(name for name in files if not (temporary / name).is_file()):
                        raise FileNotFoundError(
                            f"rank 0 does not see {unseen[0]}, which another rank wrote; output_dir must be on a "
                            "filesystem that all nodes share"
                        )
                    ranks = [{"rng": rng} for _, rng in of_ranks]
                    self._publish(temporary, final, _content(step, state, files, ranks, self._next_sequence()))
        except CheckpointWriteError:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if rank() == 0:
            self._prune(keep=final)
        return SavedCheckpoint(final, sum(r["bytes"] for r in files.values()), time.perf_counter() - started)

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

    def _next_sequence(self) -> int:
        return 1 + max((sequence for sequence, _ in self._ordered()), default=0)

    def _publish(self, temporary: Path, final: Path, content: dict[str, Any]) -> None:
        """The moment at which the folder becomes a checkpoint."""
        write_state(temporary, content)
        for folder in (temporary / MODEL, temporary / OPTIMIZER, temporary):
            if folder.is_dir():
                flush_folder(folder)
        put_in_place(temporary, final)

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


def _converted(tensors: Tensors, hook: Hook | None) -> Tensors:
    return as_rectangles(tensors if hook is None else hook(tensors))


def _write(folder: Path, tensors: Tensors) -> None:
    if tensors:
        # More threads would lose what goes wrong in them.
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, thread_count=1)
        with one_process_is_fine():
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def _write_config(model: nn.Module, folder: Path) -> None:
    """From these a reader knows what to build."""
    for name in ("config", "generation_config"):
        if save := getattr(getattr(model, name, None), "save_pretrained", None):
            save(folder)
    for path in folder.glob("*.json"):
        flush_file(path)


def _own_records(folder: Path) -> dict[str, dict[str, Any]]:
    shards = f"shard-{rank() + 1:05d}-"
    return {
        str(path.relative_to(folder)): file_record(path)
        for path in sorted(folder.rglob("*"))
        if path.name.startswith(shards) or (rank() == 0 and path.suffix in (".json", ".npz"))
    }


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
