"""Which files the weights in a checkpoint folder come from, looked at before Transformers opens any of them.

Loading a pickle can run code, so Carpool never does it. Transformers does it for every file that a folder's index
names and that does not end in `.safetensors`, wherever the name leads:

    model.safetensors.index.json    {"weight_map": {"lm_head.weight": "../outside.dat", ...}}

So each name must be that of a safetensors file in the folder itself. The file may be a link to somewhere else: caches
of downloaded models are folders of links, and safetensors holds nothing but numbers. The headers are read too, because
a file that was cut off would otherwise end in an error about bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from carpool.hf.weights.tensor_file import DTYPES

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NEVER = "which can run code when they are loaded, and Carpool never unpickles"


def check_weight_files(folder: Path, config: dict[str, Any]) -> None:
    """Refuses a checkpoint folder unless its weights are whole safetensors files of its own.

    Args:
        folder: as `save_pretrained` writes it.
        config: its config.json.

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
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index)
    for path in weights:
        _check_header(path)


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


def _check_header(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except Exception as error:  # OSError, and safetensors' own
        size = f"{path.stat().st_size:,} bytes" if path.exists() else "a link to nothing"
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
