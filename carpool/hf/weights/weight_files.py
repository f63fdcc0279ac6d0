"""Which files the weights in a checkpoint folder come from, checked before Transformers opens any of them.

Loading a pickle can run code, so Carpool never does it. Transformers does it for every file that a folder's index names
and that does not end in `.safetensors`, wherever the name leads:

    model.safetensors.index.json    {"weight_map": {"lm_head.weight": "../outside.dat", ...}}

So each name must be that of a safetensors file in the folder itself, which may be a link into a cache. The headers are
read too, because a file that was cut off would otherwise end in an error about bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, WeightConverter, WeightRenaming

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NEVER = "which can run code when they are loaded, and Carpool never unpickles"


def check_weight_files(folder: Path, config: dict[str, Any]) -> None:
    """Refuses a checkpoint folder unless its weights are whole safetensors files of its own. `config`: its config.json.

    Raises:
        ValueError: naming the file, what is wrong with it, and what to do.
    """
    if "transformers_weights" in config:
        raise ValueError(
            f"{folder / 'config.json'} names its weights itself (transformers_weights); call the file "
            "model.safetensors and remove that key"
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds an adapter beside the model; merge it into the model first (peft's merge_and_unload), or "
            "remove adapter_config.json to train the model without it"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
            raise ValueError(
                f"the weights in {folder} are pickles ({', '.join(pickles[:3])}), {_NEVER}; save the model again "
                "with safetensors"
            )
        raise ValueError(f"{folder} holds no weights (no *.safetensors file)")
    # A run's checkpoint has shards of other names, and needs none.
    if not (indices := sorted(folder.glob("*.index.json"))) and weights[-1].name.startswith("model-"):
        raise ValueError(f"{folder} has no model.safetensors.index.json for {weights[0].name}: copy it here, too")
    for index in indices:
        _check_index(index)
    for path in weights:
        check_whole(path)


def _check_index(index: Path) -> None:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        strangers = sorted({str(name) for name in names if not _is_plain(name)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights (a JSON object with a weight_map): {error!r}") from error
    if strangers:
        raise ValueError(
            f"{index} names {', '.join(strangers[:3])}, and only *.safetensors files in the same folder are read: "
            f"others may be pickles, {_NEVER}; save the model again with safetensors"
        )
    if missing := sorted({name for name in names if not (index.parent / name).is_file()}):
        raise ValueError(f"{index.parent} is incomplete: its index names {', '.join(missing[:3])}, which are not there")


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0")


def check_whole(path: Path) -> None:
    """Raise ValueError unless this is a safetensors file that can be opened, and was not cut off."""
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except Exception as error:  # OSError, and safetensors' own
        missing = "a link to nothing" if path.is_symlink() else "not there"
        size = f"{path.stat().st_size:,} bytes" if path.exists() else missing
        raise ValueError(
            f"{path} ({size}) is not a whole safetensors file: {error}; copy or download it again"
        ) from error


class Stored(NamedTuple):
    """Where a weight lies in a checkpoint folder, and what it is there."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_weights(folder: Path) -> dict[str, Stored]:
    """All tensors in a checkpoint folder that was checked, by name, in the order in which they lie there. Of a name in
    two files, Transformers' choice: that in model.safetensors, or else in a file that the index names."""
    found: dict[str, Stored] = {}
    index, loaded = folder / "model.safetensors.index.json", {"model.safetensors"}
    if not (folder / "model.safetensors").is_file() and index.is_file():
        loaded = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for path in sorted(folder.glob("*.safetensors"), key=lambda path: (path.name in loaded, path.name)):
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
        for name, part in parts.items():
            found[name] = Stored(path.name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A safetensors file written one tensor after the other: the file may be larger than the memory.
#
# `safetensors.torch.save_file` wants all tensors at once. The format does not: a header of names, dtypes, shapes and
# offsets comes first, then the bytes.
#
#     8 bytes    the size of the header
#     header     {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": ...}
#     12 bytes   a
#     ...        b

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
        entries: what the file will hold, by name, in its order.
        tensors: name and values of each, in that order; values are converted to the entry's dtype.
        written: is called with the bytes of each tensor once it is written.

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


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that transformers (5.23) cannot shard while it reads them.
#
# A checkpoint may hold weights in another form: one tensor per expert, or q, k and v in one. On several ranks
# transformers first takes this rank's shard of each tensor, along dimension 0, and then converts it
# (`WeightConverter`). Stacking experts commutes with that; what cuts, joins or permutes dimension 0 does not. The
# shapes may even fit, and then the weights are silently wrong.


def conversions_of(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """How transformers makes a model's weights of those in a checkpoint."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    return renamings, [one for one in mapping if isinstance(one, WeightConverter)]


def unshardable(model: PreTrainedModel) -> list[str]:
    """The parameters that would come out wrong if a checkpoint of this model were loaded with FSDP or EP."""
    _, converters = conversions_of(model)
    broken = [c for c in converters if not all(_keeps_dimension_0(op) for op in c.operations)]
    patterns = [p.lstrip("^").rstrip("$").replace("*", r"\d+") for c in broken for p in c._original_target_patterns]
    names = (name for name, _ in model.named_parameters())
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def merges_experts(model: PreTrainedModel) -> bool:
    """Whether a checkpoint of this model has experts one by one, which transformers stacks; it cannot stack none."""
    return any(isinstance(op, MergeModulelist) for c in conversions_of(model)[1] for op in c.operations)


def _keeps_dimension_0(operation: Any) -> bool:
    if isinstance(operation, Concatenate | Interleave):
        return operation.dim >= 1
    return isinstance(operation, MergeModulelist)
