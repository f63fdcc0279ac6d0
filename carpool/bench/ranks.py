"""How a benchmark over ranks begins: in the command, and in each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, Self

from carpool.bench.options import find_ranks
from carpool.train.config import load_config
from carpool.train.launch.start import run


class RankSettings(Protocol):
    """What `start_ranks` asks of settings."""

    @property
    def device(self) -> str: ...

    @property
    def ranks(self) -> int | None: ...

    @property
    def out(self) -> str: ...

    def resolve(self, *, cuda: bool, num_ranks: int) -> Self: ...

    def to_json(self) -> dict[str, Any]: ...


def start_ranks(settings: RankSettings, entry: str, *, debug: bool, command: str) -> None:
    """Start the ranks (or be one, under torchrun or Slurm): each calls `entry(config, settings, command)`.

    Args:
        entry: "module:function"; it gets the settings, resolved, as JSON.

    Raises:
        ValueError: settings that do not fit this machine.
        OSError: the folder cannot be written.
        carpool.train.launch.failure.RankFailure: a rank failed.
    """
    cuda, num_ranks = find_ranks(settings.device, settings.ranks)
    settings = settings.resolve(cuda=cuda, num_ranks=num_ranks)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    options = [f"parallelism.num_ranks={num_ranks}", f"parallelism.device={'cuda' if cuda else 'cpu'}"]
    config = load_config(None, [*options, f"training.output_dir={json.dumps(settings.out)}"])
    run(config, entry, debug=debug, settings=settings.to_json(), command=command)
