"""A run of a benchmark as plain values, and how it becomes files: DIR/NAME.json and DIR/NAME.png."""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

import carpool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Result:
    """A whole run; the JSON file is this. What `cases` are, each benchmark says for itself."""

    carpool_version: str
    started: str
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: Sequence[Any]

    @classmethod
    def of(
        cls, started: str, command: str, settings: dict[str, Any], device: torch.device, num_ranks: int, cases: Any
    ) -> Result:
        from carpool.metrics.host import environment

        return cls(carpool.__version__, started, command, settings, environment(device, num_ranks), cases)

    @property
    def where(self) -> str:
        """One line about the machine."""
        of = self.environment
        return f"{of['device_count']} x {of['device']}, torch {of['torch']}, commit {of['commit'] or 'unknown'}"


def now() -> str:
    """The time, for `Result.started`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def publish(result: Result, name: str, show: Callable[[Result], None], plot: str | None) -> None:
    """Write the files into the folder of the settings, and print the table; with `json_only` the JSON alone.

    Args:
        plot: the function of `carpool.bench.plots`, imported only now, because it needs matplotlib. None: no figure.
    """
    settings = dict(result.settings)
    folder, json_only = Path(settings.pop("out")), settings["json_only"]  # a folder is not what was measured
    written = [folder / f"{name}.json"]
    written[0].write_text(json.dumps(asdict(result) | {"settings": settings}, indent=1) + "\n")
    if not json_only:
        if plot is not None and _draw(result, plot, folder / f"{name}.png"):
            written.append(folder / f"{name}.png")
        show(result)
    print("wrote " + ", ".join(map(str, written)), flush=True)


def _draw(result: Result, plot: str, path: Path) -> bool:
    """Write the figure; False, and it is said, where matplotlib is missing."""
    try:
        getattr(importlib.import_module("carpool.bench.plots"), plot)(result, path)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        print("no figure: it needs matplotlib (pip install matplotlib)")
        return False
    return True


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], long: int | None = None
) -> None:
    """The first column is text, the others are numbers. Cells may have rich's markup.

    Args:
        long: a column of text that takes several lines where there is no room for one."""
    table = Table(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        text = number in (0, long)
        table.add_column(heading, justify="left" if text else "right", no_wrap=number != long)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", highlight=False)
    console.print(table, highlight=False)


def terminal(width: int) -> Console:
    """Where tables go. `width` is for a log, which has none of its own, and the default of 80 would break cells."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
