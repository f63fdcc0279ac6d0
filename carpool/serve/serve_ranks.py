"""One process per rank for `carpool generate`, `chat` and `eval`; a single rank is this process."""

from __future__ import annotations

import os
from typing import Any

import torch

from carpool.parallel.world import find_world
from carpool.train.config import load_config
from carpool.train.launch.start import run
from carpool.train.launch.worker import find_entry


def start(entry: str, ranks: int | None, *, debug: bool, **settings: Any) -> None:
    """Call `entry(config, **settings)` in each rank: those of torchrun or Slurm, or `ranks` processes of this machine.

    Args:
        ranks: None: one per GPU; 1 on a CPU.

    Raises:
        ValueError: there are fewer GPUs.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    ranks = default_ranks(ranks)
    config = load_config(None, [f"parallelism.num_ranks={ranks}"])
    if ranks == 1 and find_world(os.environ) is None:
        find_entry(entry)(config, **settings)
        return
    run(config, entry, debug=debug, **settings)


def default_ranks(asked: int | None) -> int:
    """As many as were asked for, or one for each GPU; 1 on a CPU."""
    return asked or (torch.cuda.device_count() if torch.cuda.is_available() else 1)
