"""`carpool simulate`."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli.common import Debug, Overrides, check_output, errors


def simulate(
    plan: Annotated[Path, typer.Argument(help="TOML file of `carpool plan` or for `carpool train`.")],
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Default: parallelism.num_ranks.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Rates: a GPU's name (H100, H200, ...), or a file of `carpool doctor --measure`. Default: "
            "parallelism.hardware, or H200.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="Default: parallelism.ranks_per_node, or 8.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="What `carpool trace` wrote, of this model. Default: uniform routing."),
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option("--mtbf-hours", help="Between failures of one GPU. Default: 50676, as Llama 3 had it."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", help="For which training waits for a checkpoint.")
    ] = 60.0,
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", help="From a failure until training goes on.")
    ] = 600.0,
    measured_run: Annotated[
        Path | None,
        typer.Option(
            "--measured-run",
            help="A run directory of `carpool train --elastic`, whose checkpoints and recoveries say both of these.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the pages, the profile and the trace, which are overwritten.")
    ] = Path("runs/simulate"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and no tables.")] = False,
    debug: Debug = False,
) -> None:
    """A step of a configuration on any number of GPUs: timeline, scaling, what goes wrong, failures. Needs no GPU.

    simulation.html shows all of it. profile.html is the step as `carpool profile` shows one, and `carpool profile
    --show RUN --compare OUT` shows both. profile/trace.json.gz is for ui.perfetto.dev.
    """
    with errors(debug):
        check_output("--out", out)
        for option, given in (("--mtbf-hours", mtbf_hours), ("--checkpoint-seconds", checkpoint_seconds)):
            if given is not None and not 0 < given < math.inf:
                raise ValueError(f"{option} {given:g} must be a positive number")
        if not 0 <= restart_seconds < math.inf:
            raise ValueError(f"--restart-seconds {restart_seconds:g} must be 0 or a positive number")
        measured = "assumed unless given"
        if measured_run is not None:
            from carpool.report.read import measured_costs

            checkpoint_seconds, restart_seconds = measured_costs(measured_run)
            measured = f"measured in {measured_run}"
        from rich.console import Console

        from carpool.placement.trace import Trace
        from carpool.planner.decisions.configured import SIMULATED, candidate_of, model_of
        from carpool.planner.machine.hardware import DEFAULT, find_hardware
        from carpool.planner.model.routes import Routes
        from carpool.planner.simulator.goodput import GPU_MTBF_HOURS, GPU_MTBF_SOURCE, Failures
        from carpool.planner.simulator.simulate import simulate as run
        from carpool.planner.simulator.simulate import step_on
        from carpool.planner.step.prediction import inputs
        from carpool.report.simulation import print_simulation, write_simulation
        from carpool.train.config import resolve_config
        from carpool.train.config.declarations import check_effects
        from carpool.train.config.schema_parallelism import MAX_RANKS

        resolved = resolve_config(plan, overrides or [])
        check_effects(resolved)
        if idle := [key for key in resolved.asked_now if key not in SIMULATED]:
            raise ValueError(f"{idle[0]} (on the command line) changes nothing that is simulated; leave it out")
        config = resolved.config
        settings, parallelism = config.model_dump(), config.parallelism
        shape = model_of(settings, config.model.keys)
        asked = parallelism.asked_ranks
        gpus = gpus or asked
        if gpus is None:
            raise ValueError(f"{plan} does not say for how many GPUs it is: say so with --gpus")
        if gpus > MAX_RANKS:
            raise ValueError(f"--gpus {gpus:,} are more than any machine has (at most {MAX_RANKS:,})")
        rates_name = hardware or parallelism.hardware or DEFAULT.name
        rates = find_hardware(rates_name)
        per_node = gpus_per_node or parallelism.ranks_per_node or 8
        degrees = parallelism.resolve(asked or gpus, shape.num_experts)
        candidate, notes = candidate_of(settings, degrees, shape, rates, per_node)
        failures = Failures.of_gpus(
            gpus, GPU_MTBF_HOURS if mtbf_hours is None else mtbf_hours, checkpoint_seconds, restart_seconds
        )
        recorded = None if trace is None else Trace.load(trace)
        found = run(
            lambda number: step_on(shape, rates, candidate, per_node, number),
            gpus,
            recorded,
            failures=failures,
            seed=seed,
        )
        routing = "uniform choices (assumed)" if trace is None else f"resampled from {trace} (measured)"
        about = {
            "Plan": str(plan),
            "Configuration": candidate.label,
            "Hardware": f"{rates.name}: {rates.source}",
            "GPUs of a node": str(per_node),
            **inputs(rates, candidate, Routes(), shape),
            "choices of experts": routing,
            "failures of a GPU": "given" if mtbf_hours is not None else f"{GPU_MTBF_SOURCE} (assumed)",
            "checkpoint, restart": f"{checkpoint_seconds:.3g} s, {restart_seconds:.3g} s ({measured})",
            **notes,
        }
        advice = ""
        if found.sizes[-1].efficiency < 0.8 or found.communication > 0.5:
            named = config.model.weights or tomllib.loads(plan.read_text(encoding="utf-8")).get("model", {}).get(
                "config"
            )
            advice = (
                f"The file is for {asked or gpus:,} GPUs. For a plan for {gpus:,}, with as many tokens each: carpool "
                f"plan --model {named if isinstance(named, str) else 'config.json'} --hardware {rates_name} --gpus "
                f"{gpus} --gpus-per-node {per_node} --tokens-per-batch {found.step.tokens} --sequence-length "
                f"{config.data.sequence_length} --moments {config.training.optimizer_state_dtype} "
                f"--out runs/plan-{gpus}"
            )
        page = write_simulation(found, out, about, advice)
        if as_json:
            typer.echo(json.dumps({"about": about, **found.record()}, indent=1))
            return
        print_simulation(found, Console(), advice)
        for key, value in notes.items():
            typer.echo(f"{key}: {value}")
        typer.echo(f"wrote {page}")
