"""`carpool profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carpool.cli.common import TRAIN_PACKAGES, RanksDebug, check_output, command, errors, require


def profile(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings over those of the file, as for `carpool train`."),
    ] = None,
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
        check_output("training.output_dir", Path(settings.training.output_dir))
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
