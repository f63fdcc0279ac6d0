"""The files that a rank writes of a checkpoint: which tensors are in them, and where.

PyTorch's distributed checkpointing (DCP) decides which rank writes which part of which tensor, so that nothing is
written twice, and reads the files again. What it decides depends on names, shapes and placements alone, which hardly
ever change between two checkpoints of a run: it is asked again when they do on any rank.

A file is safetensors with DCP's offsets in its metadata, and its layout is known before any value:

    8 bytes, header padded to a multiple of 64 | elements of 8 bytes, then of 4, 2, 1; by name | ...

So a file is written from the tensors themselves, or its content is put together in shared memory by copies that go
straight to their place (`carpool.train.checkpoints.host_copy`). DCP's own writer first makes one `bytes` of a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from carpool.parallel.ranks import gather, one_process_is_fine, rank
from carpool.train.checkpoints.shard_writer import BLOCK, write_file
from carpool.train.checkpoints.state_tensors import Tensors

_DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 64


class Piece(NamedTuple):
    """A part of a tensor that this rank writes: where it begins in the whole tensor, and this rank's memory of it."""

    name: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Placed(NamedTuple):
    """A piece's memory, and its first byte in the file."""

    tensor: torch.Tensor
    start: int


@dataclass(frozen=True)
class ShardFile:
    """A file before it is written. `bytes`: of all of it."""

    header: bytes
    placed: list[Placed]
    bytes: int

    @classmethod
    def of(cls, pieces: list[Piece], about: Mapping[str, str] | None = None, size: int = 0) -> ShardFile:
        """The file of these pieces.

        Args:
            about: what else its metadata says.
            size: bytes of the whole file, at least: what is missing is "padding", whose values nobody writes.

        Raises:
            ValueError: a dtype that safetensors does not have."""
        ordered = sorted(pieces, key=lambda piece: (-piece.tensor.dtype.itemsize, piece.name))
        offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in ordered}
        header: dict[str, Any] = {
            "__metadata__": {
                "DCP_SHARDING_INFO": json.dumps(offsets),
                "DCP_VERSION": "1.0",
                "format": "pt",
                **(about or {}),
            }
        }
        starts, end = [], 0
        for piece in ordered:
            if piece.tensor.dtype not in _DTYPES:
                raise ValueError(f"{piece.name} is {piece.tensor.dtype}, which safetensors files do not hold")
            starts.append(end)
            end += piece.tensor.nbytes
            shape = list(piece.tensor.shape)
            header[piece.name] = {
                "dtype": _DTYPES[piece.tensor.dtype],
                "shape": shape,
                "data_offsets": [starts[-1], end],
            }
        text = _header(header)
        if (missing := size - len(text) - end) > 0:
            # The entry makes the header longer. With the shorter number that is left it is no longer than that.
            for _ in range(2):
                header["padding"] = {"dtype": "U8", "shape": [missing], "data_offsets": [end, end + missing]}
                text = _header(header, least=len(text))
                missing = max(0, size - len(text) - end)
            end += header["padding"]["shape"][0]
        first = len(text)
        placed = [Placed(piece.tensor, first + start) for piece, start in zip(ordered, starts, strict=True)]
        return cls(text, placed, first + end)

    def write(self, path: Path) -> dict[str, Any]:
        """Writes it from the tensors as they are now: its record for `state.json`. Raises OSError."""
        return write_file(str(path), self._blocks())

    def _blocks(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor, _ in self.placed:
            if tensor.numel():
                values: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                content = memoryview(values)
                for first in range(0, len(content), BLOCK):
                    yield content[first : first + BLOCK]


def _header(header: dict[str, Any], least: int = 0) -> bytes:
    """As a file begins: its length, its text, and spaces up to a multiple of 64, `least` bytes together."""
    text = json.dumps(header).encode()
    text = text.ljust(least - 8) + b" " * (-(8 + max(len(text), least - 8)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def shard_name(part: str) -> str:
    """Of the file that this rank writes of a part of a checkpoint, inside that."""
    return f"{part}/shard-{rank() + 1:05d}-model-00001-of-00001.safetensors"


class ShardPlanner:
    """Which pieces this rank writes, as DCP decides. Remembers it as long as tensors have the same names and places."""

    def __init__(self) -> None:
        self._known: tuple[Any, dict[str, tuple[SavePlanner, list[WriteItem]]]] = (None, {})

    def shard_files(self, folder: Path, parts: Mapping[str, Tensors]) -> dict[str, ShardFile]:
        """The files of this rank, by name inside the checkpoint. Collective.

        Args:
            folder: of the checkpoint; those of its parts are there.
            parts: tensors by name, for each folder inside it, with placements that DCP can describe."""
        return {shard_name(part): ShardFile.of(its) for part, its in self.pieces(folder, parts).items() if its}

    def pieces(self, folder: Path, parts: Mapping[str, Tensors]) -> dict[str, list[Piece]]:
        """What this rank writes of each part; arguments as of `shard_files`. Collective."""
        seen = {part: _signature(tensors) for part, tensors in parts.items()}
        if not all(gather(self._known[0] == seen)):
            plans = {part: _plan(folder / part, its) for part, its in parts.items() if any(gather(bool(its)))}
            self._known = seen, plans
        found = {}
        for part, (planner, items) in self._known[1].items():
            planner.set_up_planner(dict(parts[part]))
            found[part] = [_resolve(planner, item) for item in items]
            planner.set_up_planner({})  # holds no tensors until the next save
        return found


def _resolve(planner: SavePlanner, item: WriteItem) -> Piece:
    assert item.tensor_data is not None
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), item.index
    return Piece(item.index.fqn, tuple(item.tensor_data.chunk.offsets), tensor.detach())


class _PlanOnly(HuggingFaceStorageWriter):
    """Of a save of DCP, what this rank would write."""

    planner: SavePlanner
    items: list[WriteItem]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.planner, self.items = planner, list(plan.items)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _plan(folder: Path, tensors: Tensors) -> tuple[SavePlanner, list[WriteItem]]:
    writer = _PlanOnly(str(folder), save_distributed=True)
    with one_process_is_fine():
        dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.planner, writer.items


def _signature(tensors: Tensors) -> dict[str, Any]:
    """All that DCP's plan depends on, of this rank."""
    meshes: dict[int, Any] = {}

    def placed(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return None
        mesh = tensor.device_mesh
        if id(mesh) not in meshes:
            meshes[id(mesh)] = mesh.mesh.tolist()
        return meshes[id(mesh)], tensor.placements

    return {name: (tensor.dtype, tensor.shape, placed(tensor)) for name, tensor in tensors.items()}


def total_bytes(files: Mapping[str, ShardFile]) -> int:
    """Of all files, each rounded up to whole pages."""
    return sum(math.ceil(one.bytes / 4096) * 4096 for one in files.values())
