"""What you type: `carpool train`, `profile`, `report`, `generate`, `export`, `merge`, `doctor`, `trace`, and so on.

Each command imports what it needs when it runs, so that a report can be written where there is no transformers, and
each says on one line what is wrong when the input is: `error: ...`, exit code 1. A failed rank's traceback is shown
once; for an error of the input it is shown with `--debug`. Ctrl-C and other signals exit with 128 + their number.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from importlib.metadata import entry_points
from typing import Annotated, NoReturn

import typer

from carpool.cli.bench import bench
from carpool.cli.common import UNEXPECTED
from carpool.cli.of_runs import adapter, average, checkpoint, export, merge, profile, report, upcycle
from carpool.cli.placement import place, trace
from carpool.cli.planning import plan
from carpool.cli.recipes import recipes
from carpool.cli.serve import chat, evaluate, generate
from carpool.cli.simulating import simulate
from carpool.cli.train import doctor, teach, train
from carpool.plugins.redact import redact

app = typer.Typer(
    name="carpool",
    help="Trains Mixture-of-Experts models on many accelerators: tokens that go the same way share one ride.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for function in (
    train, plan, profile, report, generate, chat, checkpoint, export, average, merge, upcycle, adapter, trace, place,
    simulate, teach, doctor,
):  # fmt: skip
    app.command()(function)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")
app.add_typer(recipes, name="recipes")
# Plug-ins' commands: "recipes.race" is `carpool recipes race`.
for entry in entry_points(group="carpool.commands"):
    group, _, name = entry.name.rpartition(".")
    try:
        {"": app, "bench": bench, "recipes": recipes}[group].command(name)(entry.load())
    except Exception as error:
        typer.echo(f"warning: the command {entry.name} of a plug-in is not there: {error!r}", err=True)


def main() -> NoReturn:
    """The command `carpool`."""
    sys.excepthook = lambda *error: sys.stderr.write(redact("".join(traceback.format_exception(*error))))
    code: object = 0
    try:
        try:
            app()
        except SystemExit as left:
            code = left.code
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            # None: whoever started the command has closed it.
            if stream is not None:
                stream.flush()
    except OSError as error:
        if getattr(error, UNEXPECTED, False):
            raise
        # Errors of a command's own files are shown by `errors`. This is the terminal, or what stands in its place.
        os.write(2, f"error: the output cannot be written: {error.strerror}\n".encode())
        code = 1
    # Not sys.exit: it takes PyTorch and Transformers apart, which lasts a second.
    os._exit(code if isinstance(code, int) else int(code is not None))


def _version(wanted: bool) -> None:
    if wanted:
        import carpool

        typer.echo(f"carpool {carpool.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
