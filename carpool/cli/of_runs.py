"""What one does with a run or a model: `carpool profile`, `report`, `export`, `merge` and `upcycle`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from carpool.cli.common import (
    TRAIN_PACKAGES,
    Debug,
    Overrides,
    RanksDebug,
    check_new_folder,
    check_output,
    check_run,
    command,
    errors,
    require,
)


def profile(
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings. Without it: the demo's.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps to run; the last one is recorded.")] = 5,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="RUN", help="Show the profile of this run's folder too, as the one before."),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option("--show", metavar="RUN", help="Record nothing: write the page of this run's profile again."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="With --show: file to write. Default: RUN/profile.html.")
    ] = None,
    debug: RanksDebug = False,
) -> None:
    """Record one step with PyTorch's profiler: a trace for Perfetto, and a page that says what hid the rides.

    It takes what `carpool train` takes and writes into training.output_dir: profile.html, profile/trace.json.gz (all
    ranks), profile/profile.json. A run there is left as it is; training.resume_from_checkpoint=last profiles its
    weights. Before and after, on one page: `carpool profile training.output_dir=runs/b --compare runs/a`, or, of two
    runs that have profiles, `carpool profile --show runs/b --compare runs/a`.
    """
    with errors(debug):
        from carpool.report.profile_page import profile_path, write_profile

        if show is not None:
            if overrides or config is not None:
                raise ValueError("--show records nothing: leave the settings out, or leave --show out to record")
            typer.echo(f"wrote {write_profile(show, compare, output)}")
            return
        if output is not None:
            raise ValueError("--output is of --show; a profile that is recorded goes to training.output_dir")
        if compare is not None:
            from carpool.profile.numbers import load_profile

            # Before any rank is started.
            load_profile(profile_path(compare))
        from carpool.cli.train import check_ahead, check_paths
        from carpool.train.config import resolve_config
        from carpool.train.launch.start import run

        resolved = resolve_config(config, overrides or [])
        settings = resolved.config
        require(TRAIN_PACKAGES)
        check_paths(resolved)
        check_output("training.output_dir", settings.training.folder)
        check_ahead(resolved, "carpool.train.run.profile_run:check_profile", debug)
        before = str(compare) if compare is not None else None
        run(
            settings,
            "carpool.train.run.profile_run:profile",
            debug=debug,
            steps=steps,
            compare=before,
            command=command(),
            fixed=resolved.fixed,
        )


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN]", help="The run's folder (training.output_dir); two to compare.")
    ],
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write. Default: RUN/report.html; of two, B/compare.html.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write what happened in a run as one HTML file, which needs no network; of two runs, what differs."""
    with errors(debug):
        from carpool.report import write_comparison, write_report

        if len(runs) > 2:
            raise ValueError(f"{len(runs)} runs were given: one is reported, two are compared")
        written = write_comparison(runs[0], runs[1], output) if len(runs) == 2 else write_report(runs[0], output)
        typer.echo(f"wrote {written}")
        if open_:
            import webbrowser

            if not webbrowser.open(written.absolute().as_uri()):
                typer.echo(f"no browser found here; open {written.absolute().as_uri()} yourself", err=True)


def checkpoint(
    run: Annotated[Path, typer.Argument(help="The folder of a run that goes on now (training.output_dir).")],
    debug: Debug = False,
) -> None:
    """Let a running run save a checkpoint after the step that it is in, and go on; wait for it and print its path.

    It works from any machine that sees the run's folder. SIGTERM and SIGUSR1 save and stop instead.
    """
    with errors(debug):
        if not run.is_dir():
            raise ValueError(f"there is no folder {run}; name a run's (training.output_dir)")
        from carpool.train.checkpoints.requested_save import request

        with Console(stderr=True).status("waiting for the end of a step, and for the checkpoint"):
            path = request(run)
        typer.echo(path)


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder (training.output_dir).")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Of this step. Default: the best, if the run keeps it, else the newest."),
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest, also if the run keeps the best.")] = False,
    weights: Annotated[
        Literal["ema", "trained"] | None,
        typer.Option("--weights", help="ema: averaged (training.ema_decay), the default of a run that averages them."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint of a run as a model folder: weights, configuration, tokenizer, as Transformers and vLLM load.

    The run may have ended in any way. One process does it, whatever number of ranks trained.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_run(run)
        check_new_folder("--out", out)
        from carpool.train.checkpoints.export import best_checkpoint, export_checkpoint, find_checkpoint, has_average

        if newest and step is not None:
            raise ValueError("--newest and --step name different checkpoints: give one of them")
        best = None if newest or step is not None else best_checkpoint(run)
        checkpoint = best or find_checkpoint(run, step)
        averaged = has_average(checkpoint) if weights is None else weights == "ema"
        with _shown() as shown:
            exported = export_checkpoint(run, checkpoint, out, averaged=averaged, **shown)
        of = "averaged weights of " if averaged else ""
        of += "the best checkpoint, " if best else ""
        typer.echo(f"model of {of}{checkpoint}: {exported._replace(folder=out)}\n{exported.checked}")


def average(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Folders of checkpoints (RUN/checkpoints/step-...), or of runs, whose newest is meant."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    debug: Debug = False,
) -> None:
    """Average the weights of checkpoints, and write the mean as a model folder, as `carpool export` does.

    They may be of one run or of several (a model soup), of the same model. What was written is read back and compared.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_new_folder("--out", out)
        from carpool.train.checkpoints.export import export_average, find_checkpoint

        for path in checkpoints:
            if not (path / "state.json").is_file():
                check_run(path)
        found = [path if (path / "state.json").is_file() else find_checkpoint(path, None) for path in checkpoints]
        with _shown() as shown:
            exported = export_average(found, out, **shown)
        typer.echo(f"mean of {len(found)} checkpoints: {exported._replace(folder=out)}\n{exported.checked}")


@contextmanager
def _shown() -> Iterator[dict[str, Any]]:
    """Inside, a bar on the terminal; what an export says to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield {
            "begin": lambda what, total: progress.reset(task, description=what, total=total),
            "advance": lambda size: progress.advance(task, size),
        }


def merge(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="The folder of a run with [adapter] (training.output_dir), or several of one model."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="The adapted model, if it is no longer where it was.")
    ] = None,
    into: Annotated[
        Literal["trained", "original"],
        typer.Option("--into", help="With adapter.base_dtype: the dequantised weights, or those of the model's files."),
    ] = "trained",
    dtype: Annotated[
        Literal["mxfp4", "nf4", "int8"] | None,
        typer.Option("--dtype", help="Of the experts written. Default: as in the model's files."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="W,...", help="Of several adapters, by which each counts, such as 0.7,0.3."),
    ] = None,
    combination: Annotated[
        Literal["cat", "linear"],
        typer.Option("--combination", help="Of several, as peft's add_weighted_adapter; cat is their exact sum."),
    ] = "cat",
    debug: Debug = False,
) -> None:
    """Merge a run's adapter into its model, and write that as a model folder with the model's own names and dtypes.

    Several adapters of one model, which may be folders as peft writes them, are added up, with --weights.

    One process does it, and holds no more than one layer's experts in memory. It reads back what it wrote and compares
    it with what was trained: tensor by tensor, and the logits of the whole model if that fits in memory. It says how
    far the merged model is from the trained one if they differ by more than rounding (--into original, --dtype).
    """
    with errors(debug):
        require((*TRAIN_PACKAGES, "peft"))
        check_new_folder("--out", out)
        named = ", ".join(map(str, runs))
        if len(runs) > 1 or weights is not None or (runs[0] / "adapter_config.json").is_file():
            from carpool.train.checkpoints.weighted_adapters import merge_adapters

            try:
                numbers = [1.0] * len(runs) if weights is None else [float(one) for one in weights.split(",")]
            except ValueError:
                raise ValueError(f"--weights {weights}: give numbers, such as 0.7,0.3") from None
            merged = merge_adapters(runs, numbers, combination, out, base=base, into=into, dtype=dtype)
        else:
            from carpool.train.checkpoints.adapter_files import merge_adapter

            check_run(runs[0])
            merged = merge_adapter(runs[0], out, base=base, logits=True, into=into, dtype=dtype)
        typer.echo(f"merged model of {named}: {merged._replace(folder=out)}\n{merged.checked}")
        from carpool.train.checkpoints.trained_base import recorded_base
        from carpool.train.config.fine_tuning import adapter_folder, base_of_adapter, other_base

        for run in runs:
            kind = base_of_adapter(run).get("base_dtype") if into == "trained" else None
            if other := other_base(str(run), str(base or recorded_base(adapter_folder(str(run)))), kind):
                typer.echo(f"warning: {other}", err=True)


def upcycle(
    dense: Annotated[Path, typer.Argument(metavar="DENSE", help="The folder of a dense checkpoint.")],
    experts: Annotated[int, typer.Option("--experts", min=2, max=4096, help="Experts of each layer.")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts that a token chooses.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; new or empty.")],
    method: Annotated[
        Literal["copy", "split"],
        typer.Option("--method", help="copy: experts are whole MLPs. split: each is a part of the MLP."),
    ] = "copy",
    parts: Annotated[int | None, typer.Option("--parts", help="With split: parts of an MLP. Default: --top-k.")] = None,
    noise: Annotated[float, typer.Option("--noise", help="Of experts, in standard deviations of a matrix.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of routers, noise and the check.")] = 0,
    debug: Debug = False,
) -> None:
    """Make an MoE checkpoint of a dense one: experts from its MLPs, routers at random, all else copied.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE, OLMo2 becomes FlexOLMo. Without noise the logits equal
    the dense model's: it compares them on random tokens, one layer in memory at a time, and fails if they do not.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_new_folder("--out", out)
        from transformers.utils.logging import disable_progress_bar

        from carpool.report.units import bytes_text
        from carpool.train.checkpoints import upcycle as upcycling
        from carpool.train.config.published import check_checkpoint

        check_checkpoint("DENSE", str(dense))
        disable_progress_bar()
        how = upcycling.Upcycling.of(method, experts, top_k, parts, noise, seed)
        with Console(stderr=True).status("writing, and comparing with the dense model"):
            made = upcycling.upcycle(dense, out, how)
        equal = "equal but for rounding" if made.promised else "not promised to be equal"
        typer.echo(
            f"{made.family} model of {dense}: {out}, {bytes_text(made.bytes)}\n"
            f"logits differ by at most {made.difference:.1e} of the largest: {equal}"
        )


def adapter(
    run: Annotated[
        Path, typer.Argument(help="A run that has trained an adapter, or an adapter's folder as peft writes it.")
    ],
    server: Annotated[Literal["vllm", "sglang"], typer.Option("--server", help="Which is to serve it.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write it in the layout that the server reads; new.")
    ] = None,
    written: Annotated[
        Path | None, typer.Option("--written", metavar="DIR", help="Check this folder, made for the server of RUN's.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="The adapted model, if it is no longer where it was.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check how a server reads an adapter: each matrix as it was trained, or left out, refused, misread, and why.

    The rules are those of vLLM 0.33.0 and SGLang 0.5.23, neither of which is needed. The command fails unless
    everything is read as trained. What --out writes is checked in the same way, and removed if it is wrong.
    """
    with errors(debug):
        require((*TRAIN_PACKAGES, "peft"))
        if out is not None:
            check_new_folder("--out", out)
        from carpool.train.checkpoints.adapter_files import base_folder
        from carpool.train.checkpoints.served_adapter import check_served
        from carpool.train.config.fine_tuning import base_of_run

        folder = run / "adapter" if (run / "adapter" / "adapter_config.json").is_file() else run
        report = check_served(folder, base_folder(folder, base), server, written, out)
        typer.echo(f"{out or written or folder}: {report}", err=bool(report.wrong))
        if report.wrong:
            raise typer.Exit(1)
        if (kind := base_of_run(run).get("base_dtype")) is not None:
            typer.echo(f"it was trained beside a base in {kind}: serve that base in {kind}, or merge (carpool merge)")
