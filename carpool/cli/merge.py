"""`carpool merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carpool.cli.common import TRAIN_PACKAGES, Debug, check_new_folder, check_run, errors, require


def merge(
    run: Annotated[Path, typer.Argument(help="The folder of a run with [adapter] (training.output_dir).")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="The adapted model, if it is no longer where it was.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Merge a run's adapter into its model, and write that as a model folder with the model's own names and dtypes.

    One process does it, and holds no more than one layer's experts in memory. It reads back what it wrote and compares
    it with the model plus the adapter: tensor by tensor, and the logits of the whole model if that fits in memory.
    """
    with errors(debug):
        require((*TRAIN_PACKAGES, "peft"))
        check_run(run)
        check_new_folder("--out", out)
        from carpool.train.checkpoints.adapter_files import merge_adapter

        merged = merge_adapter(run, out, base=base, logits=True)
        typer.echo(f"merged model of {run}: {merged._replace(folder=out)}\n{merged.checked}")
