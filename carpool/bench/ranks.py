"""How a benchmark over ranks begins: in the command, and in each rank."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.bench.options import RankOptions, find_ranks
from carpool.bench.results import Result, now, publish
from carpool.train.config import Config, load_config
from carpool.train.launch.start import run

if TYPE_CHECKING:
    import torch


class RankBenchmark(NamedTuple):
    """What one benchmark over ranks is.

    Attributes:
        name: of its files.
        settings: their class.
        measure: makes the cases, from settings, the rank's device and the command. All ranks call it together.
        show: prints the tables.
        plot: as of `carpool.bench.results.publish`.
    """

    name: str
    settings: type[RankOptions]
    measure: Callable[[Any, torch.device, str], Sequence[Any]]
    show: Callable[[Result], None]
    plot: str | None = None


def start_ranks(settings: RankOptions, benchmark: str, *, debug: bool, command: str) -> None:
    """Start the ranks (or be one, under torchrun or Slurm), measure, and show and write the results.

    Args:
        benchmark: "module:NAME" of a `RankBenchmark`, which the ranks alone import.
        command: what the user typed, for the record.

    Raises:
        ValueError: settings that do not fit this machine, or contenders asked for by name that cannot run here.
        OSError: the folder cannot be written.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    cuda, num_ranks = find_ranks(settings.device, settings.ranks)
    settings = settings.resolve(cuda=cuda, num_ranks=num_ranks)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    options = [f"parallelism.num_ranks={num_ranks}", f"parallelism.device={'cuda' if cuda else 'cpu'}"]
    config = load_config(None, [*options, f"training.output_dir={json.dumps(settings.out)}"])
    entry = "carpool.bench.ranks:measure_on_rank"
    run(config, entry, debug=debug, benchmark=benchmark, settings=settings.to_json(), command=command)


def measure_on_rank(config: Config, benchmark: str, settings: dict[str, Any], command: str) -> None:
    """One rank's part of a benchmark; the process group is there."""
    import torch.distributed as dist

    from carpool.train.launch.machine import rank_device

    module, _, name = benchmark.partition(":")
    own: RankBenchmark = getattr(importlib.import_module(module), name)
    started, device = now(), rank_device()
    cases = own.measure(own.settings.from_json(settings), device, command)
    if dist.get_rank() == 0:
        result = Result.of(started, command, settings, device, dist.get_world_size(), cases)
        publish(result, own.name, own.show, own.plot)
