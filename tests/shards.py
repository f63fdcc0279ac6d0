"""Checkpoint folders whose weight files cut what belongs together, as those of published checkpoints do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

KINDS = ("gate", "up", "w1", "w3", "down", "w2", "output_linear")
LATER = (*(f".{expert}." for expert in range(4, 8)), "bias")
# Of a tensor's name and its number in the order of names, the number of the file that it goes to.
CUTS: dict[str, Callable[[str, int], int]] = {
    # Neighbours in different files: experts are cut, and layers.
    "turns": lambda name, number: number % 3,
    # Gate, up and down of an expert in a file each; of stacked experts, gate_up and down.
    "kinds": lambda name, number: [*[kind in name for kind in KINDS], True].index(True),
    # The second half of each layer's experts, by their numbers in the names, in a file of its own; or their biases.
    "halves": lambda name, number: int(
        any(mark in name.partition("expert")[2] for mark in LATER) or "output_linear" in name
    ),
    "each": lambda name, number: number,
}


def reshard(folder: Path, cut: str) -> int:
    """Spread the tensors of a checkpoint folder over files in another way. Returns how many files there are then."""
    tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    files: dict[int, list[str]] = {}
    for number, name in enumerate(sorted(tensors)):
        files.setdefault(CUTS[cut](name, number), []).append(name)
    index = {}
    for number, (_, names) in enumerate(sorted(files.items()), start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return len(files)
