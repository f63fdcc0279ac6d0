"""`carpool export` and `carpool merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from carpool.cli.common import TRAIN_PACKAGES, Debug, check_new_folder, check_run, errors, require


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder (training.output_dir).")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of this step. Default: the newest.")] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint of a run as a model folder: weights, configuration, tokenizer, as Transformers and vLLM load.

    The run may have ended in any way. One process does it, whatever number of ranks trained.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_run(run)
        check_new_folder("--out", out)
        from carpool.train.checkpoints.export import export_checkpoint, find_checkpoint

        checkpoint = find_checkpoint(run, step)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=None)
            exported = export_checkpoint(
                run,
                checkpoint,
                out,
                begin=lambda what, total: progress.reset(task, description=what, total=total),
                advance=lambda size: progress.advance(task, size),
            )
        typer.echo(f"model of {checkpoint}: {exported._replace(folder=out)}\n{exported.checked}")


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
