"""What the commands share: options, errors, and what must be installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from carpool.plugins.redact import redact

# Distribution names of what `carpool train`, `generate` and `bench model` cannot do without.
TRAIN_PACKAGES = ("transformers", "tokenizers", "safetensors")
# And what `carpool bench experts` and `carpool bench layer` compare with.
BENCH_PACKAGES = ("transformers",)
# Set on errors whose traceback is to be shown.
UNEXPECTED = "carpool_unexpected"

# Options of several commands.
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, hidden states and routing.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over those of the file.")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Ranks on this machine. Default: one per GPU, or 4 on CPU.")]
Device = Annotated[str, typer.Option("--device", help="auto (cuda if there is a GPU, otherwise cpu), cpu or cuda.")]
JsonOnly = Annotated[bool, typer.Option("--json-only", help="Write the JSON file; no table, no figure.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
RanksDebug = Annotated[bool, typer.Option("--debug", help="Tracebacks, and the output of all ranks.")]


def command() -> str:
    """What the user typed, for the record."""
    return shlex.join(["carpool", *sys.argv[1:]])


def require(packages: tuple[str, ...]) -> None:
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install {' '.join(missing)}")


def check_writable(option: str, file: Path) -> None:
    """Raise ValueError if a file cannot be written: before the work whose result it is to hold.

    Args:
        option: that names it."""
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder: name a file in it")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {folder}; make it, or name another file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {file} may not be written here; name another file")


def check_output(option: str, folder: Path) -> None:
    """Raise ValueError if a folder cannot be written: before the work whose results it is to hold."""
    from carpool.train.records.run_folder import why_not_writable

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} {folder} is a file; name a folder")
    if why := why_not_writable(folder):
        raise ValueError(f"{option} {folder}: {why}; name another folder")


def check_new_folder(option: str, path: Path) -> None:
    """Raise ValueError unless a folder is there that is empty, or can be made."""
    check_output(option, path)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{option} {path}: the folder is not empty; choose a new one")
    if path.resolve() == Path.cwd():  # a whole folder takes the place of the empty one, in which this command is
        raise ValueError(f"{option} {path} is the working folder; choose a new one")


def check_run(path: Path) -> None:
    """Raise ValueError unless it is the folder of a run with checkpoints."""
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; name a run's (training.output_dir)")
    if not (path / "checkpoints").is_dir():
        raise ValueError(f"{path} has no checkpoints; name the folder of a run (training.output_dir) that wrote some")


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Turns what a user can put right into one line, and a failed rank into its traceback and one message."""
    from carpool.train.launch.failure import Interrupted, RankFailure, is_user_error, text_of
    from carpool.train.launch.stopping import Stopped

    try:
        yield
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.exit_code) from None
    except RankFailure as failure:
        if failure.traceback and (debug or not failure.user_error):
            typer.echo(redact(failure.traceback), err=True)
        fail(str(failure))
    except Interrupted as stopped:
        fail(str(stopped), 128 + stopped.signum)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", 130)
    except Exception as error:
        if debug or not (is_user_error(error) or isinstance(error, ImportError)):
            setattr(error, UNEXPECTED, True)
            raise
        fail(text_of(error))


def printable(text: str) -> str:
    """Text with escape sequences, which a terminal would follow, as Python writes them."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def fail(text: str, code: int = 1) -> None:
    # Under torchrun and Slurm every rank is a command of its own.
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]error{rank}:[/] {escape(printable(redact(text)))}", highlight=False
    )
    raise typer.Exit(code)
