"""A checkpoint as files: what is where, and how a reader knows that all of it is there and intact.

    step-00000100/
      state.json                 step, loader and random state, versions, and the size and SHA-256 of every other file
      model/shard-00001-model-00001-of-00001.safetensors      what rank 0 wrote of the model (parts, with their offsets)
      model/shard-00002-...                                   rank 1, and so on
      model/config.json, generation_config.json               what to build before the weights can be loaded
      optimizer/shard-...                                     the same for the optimizer's state
      ema/shard-...                                           and for averages of weights, in float32, if there are any

Everything is text or safetensors. DCP's own format keeps a pickle, and loading a pickle runs whatever code is in it, so
Carpool neither writes nor reads any.

`state.json` is written last, and the folder gets its name last of all, by one rename: a folder with that name is whole,
as far as the writer could tell. The reader still checks sizes and sums, because disks and copies go wrong later.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from carpool.report.record_types import explain

FORMAT = "carpool-checkpoint-1"
STATE_FILE = "state.json"
MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "ema"
_BLOCK, _HASHING_THREADS = 1 << 24, 4
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp")


class FileRecord(BaseModel):
    """A file of a checkpoint, as `state.json` has it."""

    bytes: int = Field(ge=0)
    sha256: str


class RankRecord(BaseModel):
    """What a rank keeps for itself: the state of its random generators (`carpool.train.checkpoints.state_tensors`)."""

    rng: dict[str, Any]


class State(BaseModel):
    """`state.json`. `state` is the run's own (`carpool.train.checkpoints.resume.RunState`)."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    sequence: int = Field(ge=0)
    written: str
    versions: dict[str, str]
    world_size: int = Field(ge=1)
    state: dict[str, Any]
    files: dict[str, FileRecord]
    ranks: list[RankRecord]

    @model_validator(mode="after")
    def _fits(self) -> State:
        if len(self.ranks) != self.world_size:
            raise ValueError(f"{len(self.ranks)} ranks are recorded, and world_size is {self.world_size}")
        for name in self.files:
            if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise ValueError(f"files names {name!r}, which is not inside the checkpoint")
        return self


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. Nothing of the model or the optimizer was changed."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written. The checkpoints from before are untouched."""


def file_record(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as in `state.json`."""
    return {"bytes": path.stat().st_size, "sha256": _file_digest(path, lambda _: None)}


def _file_digest(path: Path, read: Callable[[int], None]) -> str:
    """`read` is told the bytes of each block."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_state(folder: Path, content: dict[str, Any]) -> None:
    """Writes `state.json`, with the format mark and a checksum of itself, and flushes it to the disk."""
    # As it will be read: JSON turns keys into text and tuples into lists, and the checksum must not see a difference.
    content = json.loads(json.dumps({"format": FORMAT, **content}))
    path = folder / STATE_FILE
    path.write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1), encoding="utf-8")
    flush_file(path)


def flush_file(path: Path) -> None:
    """Waits until the content of a file that somebody else wrote and closed is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Makes names in a folder survive a power cut, as fsync does for the content of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, final: Path) -> None:
    """Gives a whole folder its name. One that has it already makes way first, and goes when the new one is there."""
    replaced = final.with_name(f".old-{final.name}-{secrets.token_hex(4)}")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_left(final: Path) -> None:
    """Removes what writers left beside a folder that they were killed over: under `.tmp-`, and, once a new one has been
    put in place, under `.old-`."""
    for kind in ("tmp", "old") if final.exists() else ("tmp",):
        for path in final.parent.glob(f".{kind}-{glob.escape(final.name)}-{'[0-9a-f]' * 8}"):
            shutil.rmtree(path, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint.

    Raises:
        CheckpointError: there is none, it is foreign, of another version, or damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(_why_no_checkpoint(folder))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("sha256", None)
        mark = content.get("format")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use an older checkpoint") from error
    if mark != FORMAT:
        if str(mark).startswith(FORMAT.rstrip("0123456789")):
            raise CheckpointError(f"{folder} has format {mark}, this version of Carpool reads {FORMAT}; update Carpool")
        raise CheckpointError(f"{path} does not have the mark {FORMAT!r}: {folder} is not a Carpool checkpoint")
    if found != _digest(content):
        raise CheckpointError(f"{path} is damaged (wrong checksum); use an older checkpoint")
    try:
        State.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged ({explain(error)}); use an older checkpoint") from error
    return dict(content)


def _why_no_checkpoint(folder: Path) -> str:
    if not folder.exists():
        beside = sorted(p.name for p in folder.parent.glob("step-*")) if folder.parent.is_dir() else []
        return f"there is no checkpoint {folder}" + (f"; beside it are {', '.join(beside)}" if beside else "")
    if not folder.is_dir():
        pickle = ", and Carpool never unpickles" if folder.suffix in _PICKLES else ""
        return f"{folder} is a file, and a Carpool checkpoint is a folder{pickle}"
    for inside in (folder, folder / "checkpoints"):
        if steps := sorted(p.name for p in inside.glob("step-*")):
            return f"{folder} is not a checkpoint itself, but holds some; resume from {inside / steps[-1]}"
    foreign = sorted(p.name for p in folder.iterdir() if p.name == ".metadata" or p.suffix in _PICKLES)
    if foreign:
        return (
            f"{folder} is not a Carpool checkpoint: it holds pickles ({', '.join(foreign[:3])}), which can run code "
            "when they are loaded, and Carpool never unpickles"
        )
    if (folder / "config.json").is_file():
        return (
            f"{folder} is a model without optimizer state, not a Carpool checkpoint; start a new run from it with "
            "model.path instead of resuming it"
        )
    return f"{folder} is not a Carpool checkpoint: it has no {STATE_FILE}"


def check_files(
    folder: Path,
    records: dict[str, dict[str, Any]],
    mine: Iterable[str],
    checked: Callable[[int], None] = lambda _: None,
) -> None:
    """Checks that the files of a checkpoint are those in `records` and intact. Of the content, only files in `mine`.
    `checked` is told how many bytes of these are read.

    Raises:
        CheckpointError: naming the file, and how it is wrong.
    """
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing; use an older checkpoint")
        if (size := path.stat().st_size) != record["bytes"]:
            wrong = "truncated" if size < record["bytes"] else "damaged"
            raise CheckpointError(
                f"{path} is {wrong}: it has {size} bytes instead of {record['bytes']}; use an older checkpoint"
            )
    strangers = {str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")} - records.keys()
    if strangers:
        raise CheckpointError(f"{folder} holds files that Carpool did not write there: {', '.join(sorted(strangers))}")
    names = list(mine)
    # Hashing is slower than a disk, and leaves Python's lock alone.
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for name, digest in zip(names, threads.map(lambda n: _file_digest(folder / n, checked), names), strict=True):
            if digest != records[name]["sha256"]:
                raise CheckpointError(f"{folder / name} is damaged (wrong checksum); use an older checkpoint")


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and dtypes of the tensors in a folder of shards, read from the headers of the files alone.

    Raises:
        CheckpointError: a header that is no safetensors header, or tensors of which parts are missing.
    """
    return {name: tensor for name, (tensor, _) in stored_parts(folder).items()}


def stored_parts(folder: Path) -> dict[str, tuple[TensorStorageMetadata, list[Path]]]:
    """`stored_tensors`, and the file of each of a tensor's chunks.

    Raises:
        CheckpointError: as `stored_tensors`.
    """
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except Exception as error:  # safetensors raises its own, and whatever a wrong header leads to
        raise CheckpointError(f"{folder} holds a file that is not intact safetensors: {error}") from error
    tensors: dict[str, tuple[TensorStorageMetadata, list[Path]]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in stored.chunks) != stored.size.numel():
            raise CheckpointError(f"{folder} holds only parts of {name}")
        places = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in stored.chunks]
        tensors[name] = stored, [Path(place.relative_path) for place in places]
    return tensors
