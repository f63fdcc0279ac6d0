"""A checkpoint of random weights with the shapes, names, dtype and sharding of a published one, without downloading it.

    python -m tools.random_checkpoint qwen3-30b-a3b --out /scratch/qwen3-30b              61 GB in 16 files
    python -m tools.random_checkpoint olmoe-1b-7b --layers 4 --out /scratch/olmoe-cut

For measuring how fast a model of that size loads, trains and comes out again. Values are those of a model from scratch:
normal with the configuration's `initializer_range`, ones for norms, zeros for biases. They depend on the seed alone.
Tensors are made one group at a time (`carpool.hf.weights.original_layout`), so a machine with a tenth of the memory
will do.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from transformers import PreTrainedConfig

from carpool.hf.weights.original_layout import OriginalLayout
from carpool.hf.weights.weight_files import Entry
from carpool.train.blueprint import meta_model, model_config
from carpool.train.checkpoints.export import check_space
from carpool.train.config.published import FROM

# GB of the files of published checkpoints: 16 files, 3 files.
SHARD_GB = {"qwen3-30b-a3b": 4.0, "olmoe-1b-7b": 5.0}
# Elements that one generator draws.
_PIECE = 1 << 24


def plan(
    source: str | Mapping[str, Any], layers: int | None, shard_gb: float
) -> tuple[PreTrainedConfig, OriginalLayout]:
    """The configuration, and what is in which file.

    Args:
        source: as `carpool.train.blueprint.model_config`.
        layers: of a model that is cut after so many; None: all.
        shard_gb: the most that a file holds.
    """
    keys: Mapping[str, Any] = {FROM: source} if isinstance(source, str) else source
    config = model_config(keys if layers is None else {**keys, "num_hidden_layers": layers})
    config.dtype = torch.bfloat16
    layout = OriginalLayout(meta_model(config), None, {}, int(shard_gb * 10**9))
    config.architectures = [layout.architecture]
    return config, layout


def write(
    folder: Path, config: PreTrainedConfig, layout: OriginalLayout, seed: int, written: Callable[[int], None]
) -> None:
    """Writes the folder.

    Raises:
        OSError: it is in use, or too small.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    check_space(folder, layout.bytes)
    folder.mkdir(parents=True, exist_ok=True)
    deviation = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        layout.write(folder, lambda name: _values(layout.tensors[name], name, deviation, seed, threads), None, written)
    layout.write_index(folder)
    config.save_pretrained(folder)


def _values(entry: Entry, name: str, deviation: float, seed: int, threads: ThreadPoolExecutor) -> torch.Tensor:
    if len(entry.shape) < 2 or not entry.dtype.is_floating_point:
        return torch.full(entry.shape, float(name.endswith("weight")), dtype=entry.dtype)
    values = torch.empty(entry.shape, dtype=entry.dtype)

    def draw(numbered: tuple[int, torch.Tensor]) -> None:
        number, piece = numbered
        # The generator of a CPU has seeds of 32 bits.
        own = zlib.crc32(f"{seed} {name} {number}".encode())
        piece.normal_(0, deviation, generator=torch.Generator().manual_seed(own))

    list(threads.map(draw, enumerate(values.view(-1).split(_PIECE))))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a published configuration's short name, or the path of a config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; new or empty")
    parser.add_argument("--layers", type=int, help="cut the model after so many layers")
    parser.add_argument("--shard-gb", type=float, help="the most that a file holds (default: as published, or 5)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shard_gb = given.shard_gb or SHARD_GB.get(given.model, 5.0)
    try:
        config, layout = plan(given.model, given.layers, shard_gb)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("", total=layout.bytes)
            write(given.out, config, layout, given.seed, lambda size: progress.advance(task, size))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{given.out}: {config.architectures[0]}, {layout.bytes / 1e9:.2f} GB in {len(layout.files)} files")


if __name__ == "__main__":
    main()
