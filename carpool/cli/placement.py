"""`carpool trace` and `carpool place`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.cli.common import TRAIN_PACKAGES, Debug, Seed, check_output, check_writable, command, errors, require
from carpool.serve import check_folder

if TYPE_CHECKING:
    from carpool.planner.machine.cost import CostModel

EPRanks = Annotated[int, typer.Option("--ranks", min=1, help="Expert-parallel ranks.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines that they are on, equally many on each.")]
Rates = Annotated[
    str,
    typer.Option("--hardware", help="Rates: a GPU's name (H100, H200, ...), or a file of `carpool doctor --measure`."),
]
Hidden = Annotated[int, typer.Option("--hidden", min=1, help="H of the cost model.")]
ExpertHidden = Annotated[int, typer.Option("--expert-hidden", min=1, help="F of the cost model.")]
TokensPerRank = Annotated[int, typer.Option("--tokens-per-rank", min=1, help="Of the cost model.")]


def cost_model(hidden: int, expert_hidden: int, tokens_per_rank: int, hardware: str) -> CostModel:
    """Of the options above."""
    from carpool.planner.machine.cost import CostModel
    from carpool.planner.machine.hardware import find_hardware

    rates = find_hardware(hardware)
    return CostModel(hidden=hidden, expert_hidden=expert_hidden, tokens_per_rank=tokens_per_rank, hardware=rates)


def trace(
    model: Annotated[Path, typer.Argument(help="A checkpoint's folder (config.json, safetensors), or a run's.")],
    out: Annotated[Path, typer.Option("--out", help="File to write, .npz.")] = Path("trace.npz"),
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help='Files, folders, globs, or "stdlib"; may be repeated. Default: the text of the run, or stdlib.',
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to record, in whole sequences.")] = 8192,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=2, help="Of the forwards. Default: that of the run, or 512.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="As data.tokenizer. Default: of the run or the checkpoint.")
    ] = None,
    eos_token: Annotated[str | None, typer.Option("--eos-token", help="As data.eos_token.")] = None,
    text_field: Annotated[str, typer.Option("--text-field", help="Of JSON lines and Parquet.")] = "text",
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Text to read at most.")] = 64 << 20,
    weights: Annotated[bool, typer.Option("--weights", help="Record routing weights, too.")] = False,
    debug: Debug = False,
) -> None:
    """Record which experts the tokens of a text choose in each layer of a model, for `carpool place`."""
    with errors(debug):
        require(TRAIN_PACKAGES)
        check_folder(model)
        check_writable("--out", out)
        from transformers.utils.logging import disable_progress_bar

        from carpool.train.checkpoints.record_trace import record

        if not sys.stderr.isatty():
            disable_progress_bar()
        recorded = record(
            model,
            tuple(data or ()),
            tokens=tokens,
            sequence_length=sequence_length,
            tokenizer=tokenizer,
            eos_token=eos_token,
            text_field=text_field,
            max_bytes=max_bytes,
            weights=weights,
            command=command(),
        )
        recorded.save(out)
        measures = [recorded.layer(name).specialisation() for name in recorded.layers]
        means = {key: sum(one[key] for one in measures) / len(measures) for key in measures[0]}
        typer.echo(
            f"wrote {out}: {recorded.num_tokens} tokens of {len(recorded.layers)} layers, "
            f"{out.stat().st_size / 1024:.0f} KiB"
        )
        typer.echo("mean over layers: " + ", ".join(f"{key} {value:.3f}" for key, value in means.items()))


def place(
    trace: Annotated[Path, typer.Argument(help="What `carpool trace` wrote.")],
    ranks: EPRanks,
    nodes: Nodes = 1,
    solvers: Annotated[
        str | None,
        typer.Option(
            "--solvers",
            metavar="NAME,...",
            help="contiguous, random, lpt, eplb, occult, hypergraph, search, those of plug-ins, or NAME+search. "
            "Default: all, and hypergraph+search.",
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option("--slots", metavar="N,...", help="Experts that each rank has memory for. Default: equally many."),
    ] = None,
    load_limit: Annotated[float, typer.Option("--load-limit", min=1.0, help="Fullest rank by the mean.")] = 1.1,
    expert_groups: Annotated[
        int | None, typer.Option("--expert-groups", min=1, help="Of eplb: groups of experts, in order.")
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            "--transport", help="Over which tokens travel to the experts. Default: what moe.transport=auto takes there."
        ),
    ] = None,
    hidden: Hidden = 2048,
    expert_hidden: ExpertHidden = 1024,
    tokens_per_rank: TokensPerRank = 8192,
    hardware: Rates = "H200",
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for layouts.json, place.json and place.png, which are overwritten.")
    ] = Path("runs/place"),
    every_layer: Annotated[bool, typer.Option("--every-layer", help="A table for each layer.")] = False,
    debug: Debug = False,
) -> None:
    """Where experts should live: every solver on one half of a trace, judged on the other half.

    layouts.json, the best found for each layer, is what moe.layout of `carpool train` and carpool.hf.set_layout take.
    place.png shows the layer in the middle.
    """
    with errors(debug):
        check_output("--out", out)
        from importlib.util import find_spec

        from rich.progress import track

        from carpool.placement.solvers import default_solvers
        from carpool.placement.table import place, plot_coactivation, print_table
        from carpool.placement.trace import Trace

        names = tuple(one.strip() for one in solvers.split(",") if one.strip()) if solvers else default_solvers()
        recorded = Trace.load(trace)
        cost = cost_model(hidden, expert_hidden, tokens_per_rank, hardware)
        name, why = _transport(transport, recorded.top_k, ranks, nodes, cost)
        cost = replace(cost, transport=name)
        one_thread()
        steps = iter(track(range(len(names) * len(recorded.layers)), description="solving", transient=True))

        def on_row(_: object) -> None:
            next(steps, None)

        result = place(
            recorded,
            ranks=ranks,
            nodes=nodes,
            solvers=names,
            slots=_numbers("--slots", slots),
            load_limit=load_limit,
            expert_groups=expert_groups,
            seed=seed,
            cost=cost,
            on_row=on_row,
        )
        list(steps)
        typer.echo(f"transport {name}: {why}")
        out.mkdir(parents=True, exist_ok=True)
        result.layouts.save(out / "layouts.json")
        written = {**result.to_dict(), "command": command(), "trace": str(trace)}
        (out / "place.json").write_text(json.dumps(written, indent=1) + "\n")
        print_table(result, every_layer=every_layer)
        middle = list(result.layouts)[len(result.layouts) // 2]
        figure = find_spec("matplotlib") is not None
        if figure:
            plot_coactivation(recorded.split(2)[1].layer(middle), result.layouts[middle], out / "place.png")
        else:
            typer.echo("no figure: it needs matplotlib (pip install matplotlib)")
        written_files = f"{out}/layouts.json, place.json{', place.png' if figure else ''}"
        typer.echo(f"wrote {written_files}; train with moe.layout={out}/layouts.json")


def _transport(asked: str | None, top_k: int, ranks: int, nodes: int, cost: CostModel) -> tuple[str, str]:
    """Over which transport tokens travel to the experts, and why. `nvlink` sends what `dedup` sends."""
    from carpool.layout.topology import Topology
    from carpool.planner.transports import automatic_transport
    from carpool.transport import choose_transport

    if asked is not None:
        return choose_transport(asked, ranks, top_k)
    return automatic_transport(
        ranks, top_k, None, Topology.even(ranks, nodes), hidden=cost.hidden, element_size=cost.element_size,
        tokens=cost.tokens_per_rank, hardware=cost.hardware, limited=False,
    )  # fmt: skip


def one_thread() -> None:
    """Solvers run thousands of small operations, whose threads would mostly wait for each other."""
    import torch

    torch.set_num_threads(1)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text} must be numbers with commas between, one for each rank") from None
