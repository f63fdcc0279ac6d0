"""`carpool bench` as tests call it, and what its tables print."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from click.testing import Result as Invoked
from rich.console import Console
from typer.testing import CliRunner

from carpool import cli
from carpool.bench.result_files import Result

WHERE = {"device_count": 4, "device": "a GPU", "torch": "2", "commit": None}


def bench(*args: str) -> Invoked:
    return CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1"}).invoke(cli.app, ["bench", *args])


def result_of(cases: list[Any], **settings: Any) -> Result:
    return Result("0", "now", "carpool bench", settings, WHERE, cases)


def printed(show: Callable[..., None], result: Result, width: int = 140) -> str:
    out = io.StringIO()
    show(result, Console(file=out, width=width))
    return out.getvalue()


def lines_of(text: str) -> list[str]:
    """Without the spaces between columns."""
    return [" ".join(line.split()) for line in text.splitlines()]
