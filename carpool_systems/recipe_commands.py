"""`carpool recipes check` by what a run does, `compare` on a recording, and `race` in training steps."""

from __future__ import annotations

import enum
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli.common import (
    TRAIN_PACKAGES,
    Debug,
    Device,
    JsonOnly,
    Ranks,
    RanksDebug,
    Seed,
    check_output,
    command,
    errors,
    require,
)
from carpool.cli.placement import EPRanks, ExpertHidden, Hidden, Nodes, Rates, TokensPerRank, cost_model, one_thread


def check_recipes(
    names: Annotated[list[str], typer.Argument(help="Recipes, or paths of TOML files.")],
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks on this machine.")] = 4,
    device: Device = "cpu",
    debug: RanksDebug = False,
) -> None:
    """Run a tiny model for three steps under each recipe, and say which of its mechanisms were observed."""
    with errors(debug):
        require(TRAIN_PACKAGES)
        from carpool.train.config import load_config
        from carpool.train.launch.start import run
        from carpool_systems.mechanisms import load

        for name in names:
            load(name)
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"parallelism.num_ranks={ranks}", f"parallelism.device={device}"]
            config = load_config(None, [*settings, f"training.output_dir={json.dumps(folder)}"])
            run(config, "carpool_systems.observe:check_rank", debug=debug, names=names, folder=folder)


class Vary(enum.StrEnum):
    """What a comparison of recipes varies."""

    PLACEMENT = "placement"
    TRANSPORT = "transport"
    ROUTING = "routing"


def compare_recipes(
    trace: Annotated[Path, typer.Option("--trace", help="What `carpool trace` wrote.")],
    vary: Annotated[
        Vary,
        typer.Option(
            "--vary",
            help="The one thing that differs between rows. placement: where experts live; transport: how many rows "
            "travel; routing: to how many ranks a token may go.",
        ),
    ] = Vary.PLACEMENT,
    ranks: EPRanks = 4,
    nodes: Nodes = 1,
    only: Annotated[
        str | None,
        typer.Option(
            "--recipes", metavar="NAME,...", help="Names, or paths of TOML files. Default: all that can be compared so."
        ),
    ] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="Of all rows, unless it varies. Default: dedup.")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", help="The recipe that places experts in all rows. Default: experts in order."),
    ] = None,
    parts: Annotated[int, typer.Option("--parts", min=2, help="Parts of the trace, replayed one by one.")] = 8,
    hidden: Hidden = 2048,
    expert_hidden: ExpertHidden = 1024,
    tokens_per_rank: TokensPerRank = 8192,
    hardware: Rates = "H200",
    seed: Seed = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for recipes.json, which is overwritten.")] = Path(
        "runs/recipes"
    ),
    debug: Debug = False,
) -> None:
    """Replay a trace under each recipe, one thing varied: rows, load, modelled time, what was moved."""
    with errors(debug):
        check_output("--out", out)
        from rich.console import Console
        from rich.progress import Progress

        from carpool.placement.trace import Trace
        from carpool_systems.compare import chosen, compare, print_table, ways
        from carpool_systems.mechanisms import load

        for given, axis in ((transport, Vary.TRANSPORT), (placement, Vary.PLACEMENT)):
            if given is not None and vary == axis:
                raise ValueError(
                    f"--{axis} {given} is for all rows, and --vary {axis} lets it differ: give one of them"
                )
        way = transport or "dedup"
        placed = load(placement) if placement is not None else None
        taken, refused = chosen(vary.value, [name.strip() for name in only.split(",")] if only else None)
        recorded = Trace.load(trace)
        one_thread()
        total = len(ways(vary.value, taken, way, placed)) * len(recorded.layers)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("replaying", total=total)
            found = compare(
                vary.value,
                taken,
                recorded,
                ranks=ranks,
                nodes=nodes,
                transport=way,
                placement=placed,
                parts=parts,
                seed=seed,
                cost=cost_model(hidden, expert_hidden, tokens_per_rank, hardware),
                on_layer=lambda name: progress.update(task, advance=1, description=name),
            )
        same = {"transport": way, "placement": placement or "experts in order", "routing": "as recorded"}
        del same[vary.value]
        out.mkdir(parents=True, exist_ok=True)
        settings = {"trace": str(trace), "ranks": ranks, "nodes": nodes, "parts": parts, "seed": seed}
        written = {
            "command": command(),
            "settings": {**settings, "vary": vary.value, **same},
            "refused": refused,
            "rows": [asdict(one) for one in found],
        }
        (out / "recipes.json").write_text(json.dumps(written, indent=1) + "\n")
        print_table(found, vary.value, nodes=nodes, same=same, refused=refused)
        typer.echo(f"wrote {out}/recipes.json")


def race_recipes(
    names: Annotated[str, typer.Option("--recipes", metavar="NAME,...", help="Names, or paths of TOML files.")],
    model: Annotated[
        str,
        typer.Option("--model", help="demo, a published configuration such as qwen3-30b-a3b, or a config.json."),
    ] = "demo",
    transport: Annotated[
        str,
        typer.Option("--transport", help="Of all rows. A recipe that names another one runs over its own, too."),
    ] = "alltoall",
    beside: Annotated[
        str,
        typer.Option(
            "--beside",
            metavar="NAME,...",
            help="Who else takes steps: some of carpool, carpool-compiled, transformers, transformers-compiled.",
        ),
    ] = "transformers",
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first of its layers.")] = None,
    ranks: Ranks = None,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens in one sequence.")] = 128,
    batch: Annotated[int, typer.Option("--batch", help="Sequences of a rank in a micro-batch.")] = 4,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches in a step.")] = 1,
    routing: Annotated[
        str,
        typer.Option("--routing", help="learned (the routers choose), balanced, or the .npz file of a trace."),
    ] = "learned",
    steps: Annotated[int, typer.Option("--steps", help="Steps back to back in a round.")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds, in which recipes take turns.")] = 3,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting of `carpool train`, for all rows."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for race.json and race.png, which are overwritten.")
    ] = Path("runs/race"),
    json_only: JsonOnly = False,
    debug: RanksDebug = False,
) -> None:
    """Training steps of one model under each recipe, in turns: the same weights, tokens and transport.

    It starts the ranks itself, unless torchrun or Slurm started it.
    """
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_output("--out", out)
        if not names.strip(", "):
            raise ValueError("--recipes is empty: name some; `carpool recipes list` has all")
        from carpool.bench.model.model_settings import MODEL_CONTENDERS, ModelSettings
        from carpool.bench.options import one_of, split
        from carpool.transport import find_transport
        from carpool_systems.race import race

        find_transport(transport)
        for name in split(beside):
            one_of("--beside", name, MODEL_CONTENDERS)
        settings = ModelSettings(
            model=model, layers=layers, ranks=ranks, device=device, sequence=sequence, batch=batch,
            accumulation=accumulation, routing=routing, contenders=split(beside), steps=steps, rounds=rounds,
            overrides=tuple(overrides or ()), seed=seed, out=str(out), json_only=json_only,
        )  # fmt: skip
        race(settings, split(names), transport, debug=debug, command=command())
