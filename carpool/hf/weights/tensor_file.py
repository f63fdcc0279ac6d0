"""A safetensors file written one tensor after the other: the file may be larger than the memory.

`safetensors.torch.save_file` wants all tensors at once. The format does not: a header of names, dtypes, shapes and
offsets comes first, then the bytes. Who knows names, dtypes and shapes beforehand can write the header at once.

    8 bytes    the size of the header
    header     {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}
    12 bytes   a
    ...        b
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import _TYPES

# By their names in headers: https://huggingface.co/docs/safetensors#format
DTYPES: dict[str, torch.dtype] = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """What the header says of a tensor, but for where it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path,
    entries: Mapping[str, Entry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes a safetensors file. Of the tensors it holds one at a time.

    Args:
        path: of the new file.
        entries: what the file will hold, by name, in the order in which it will lie there.
        tensors: name and values of each, in that order; values are converted to the entry's dtype.
        written: told the bytes of each tensor once it is written.

    Raises:
        ValueError: a tensor that is not the next of `entries`, or has another shape.
        OSError: the file cannot be written.
    """
    with path.open("wb") as stream:
        stream.write(_header(entries))
        expected = iter(entries.items())
        for name, tensor in tensors:
            next_name, entry = next(expected, ("the end of the file", None))
            if entry is None or name != next_name or tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{path}: got {name} {tuple(tensor.shape)}, and {next_name} {entry} is next")
            content = tensor.detach().to("cpu", entry.dtype).contiguous()
            stream.write(content.reshape(-1).view(torch.uint8).numpy().data)
            written(entry.bytes)
        if rest := next(expected, None):
            raise ValueError(f"{path}: no values came for {rest[0]}")


def _header(entries: Mapping[str, Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        places = [offset, offset + entry.bytes]
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": places}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_index(folder: Path, files: Mapping[str, Mapping[str, Entry]]) -> None:
    """Writes `model.safetensors.index.json`, which says what is in which file. `model.safetensors` alone needs none."""
    if files.keys() == {"model.safetensors"}:
        return
    content = {
        "metadata": {"total_size": sum(entry.bytes for entries in files.values() for entry in entries.values())},
        "weight_map": {name: file for file, entries in files.items() for name in entries},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def split_by_size(entries: Mapping[str, Entry], most: int) -> dict[str, dict[str, Entry]]:
    """Files of at most `most` bytes, named as Transformers names them, with their tensors in the given order. A larger
    tensor has a file of its own."""
    files: list[dict[str, Entry]] = [{}]
    room = most
    for name, entry in entries.items():
        if files[-1] and entry.bytes > room:
            files.append({})
            room = most
        files[-1][name] = entry
        room -= entry.bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files)}
