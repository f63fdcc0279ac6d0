"""`carpool plan`."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli.common import Debug, check_output, command, errors

MAX_TOKENS = 2**40


def plan(
    model: Annotated[
        str, typer.Option("--model", help="A published name (qwen3-235b-a22b), a config.json, or its folder.")
    ],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="All of them.")],
    tokens: Annotated[str, typer.Option("--tokens-per-batch", help="Of a step, all GPUs together, such as 4M.")],
    hardware: Annotated[
        str, typer.Option("--hardware", help="A GPU's name (H100, H200, ...), or a file of `carpool doctor --measure`.")
    ] = "H100",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Consecutive ranks of a node.")] = 8,
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=1, help="Tokens.")] = 4096,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Choices of experts, from `carpool trace`. Default: uniform.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="What a rank may use, such as 70GiB. Default: 92 % of the device.")
    ] = None,
    moments: Annotated[
        str, typer.Option("--moments", help="Of AdamW: float32, or bfloat16 or int8 (lossy).")
    ] = "float32",
    max_grad_norm: Annotated[
        float, typer.Option("--max-grad-norm", min=0.0, help="0: no clipping, and gradients may be consumed.")
    ] = 1.0,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="What the search may choose, such as ep=8,16. Several times.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A published planner (alpa, tutel, ...), beside the plan.")
    ] = None,
    moves: Annotated[
        bool, typer.Option("--moves", help="Search by moves away from the bottleneck (Aceso): sooner, one plan.")
    ] = False,
    best: Annotated[int, typer.Option("--best", min=1, max=50, help="Configurations to show.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for plan-1.toml, plan-2.toml, ... and plan.html.")
    ] = None,
    debug: Debug = False,
) -> None:
    """The best configurations of a model on a cluster, predicted from its config.json and rates of the hardware.

    Nothing is measured. Each configuration is a file that `carpool train --config` takes.
    """
    with errors(debug):
        if out is not None:
            check_output("--out", out)
        from carpool.bench.options import one_of
        from carpool.bench.result_files import terminal
        from carpool.cli.plan_page import Shown, print_policies, why_none
        from carpool.planner.machine.hardware import find_hardware
        from carpool.planner.model.routes import Routes
        from carpool.planner.model.shape import ModelShape
        from carpool.planner.search.plan import plan as search
        from carpool.planner.search.space import MOVES, PLANNERS, Space, read_constraints
        from carpool.plugins.nearest import did_you_mean
        from carpool.train.config.declarations import declared
        from carpool.train.config.published import read_keys
        from carpool.train.config.schema import config_type
        from carpool.train.config.schema_base import size_of
        from carpool.train.config.schema_parallelism import MAX_RANKS

        if gpus > MAX_RANKS:
            raise ValueError(f"--gpus {gpus:,} are more than any machine has (at most {MAX_RANKS:,})")

        shape, rates = ModelShape.read(read_keys(model)), find_hardware(hardware)
        routes = Routes()
        if trace is not None:
            from carpool.placement.trace import Trace

            routes = Routes.of(Trace.load(trace), str(trace), shape.num_experts, shape.top_k)
        one_of("--moments", moments, ("float32", "bfloat16", "int8"))
        batch = number_of(tokens)
        if batch > MAX_TOKENS:
            raise ValueError(f"--tokens-per-batch {tokens} is more than any step has (at most {MAX_TOKENS:,})")
        if not math.isfinite(max_grad_norm):
            raise ValueError(f"--max-grad-norm {max_grad_norm:g} must be a finite number; 0 clips nothing")
        if batch < sequence_length:
            raise ValueError(
                f"--tokens-per-batch {tokens} is {batch:,} tokens, less than one sequence of {sequence_length:,} "
                "(--sequence-length)"
            )
        usable = None if memory is None else float(size_of(memory, "--memory"))
        if unknown := [name for name in policy or () if name not in PLANNERS]:
            hint = did_you_mean(unknown[0], PLANNERS)
            raise ValueError(f"--policy {unknown[0]} is not known; there are {', '.join(sorted(PLANNERS))}{hint}")
        space = read_constraints(
            Space(
                moments=moments,
                max_grad_norm=max_grad_norm,
                optimizer_in_backward=Space.optimizer_in_backward if max_grad_norm else (False, True),
                excluded=declared(config_type()).why_refused,
            ),
            only or (),
        )
        ask = partial(
            search, shape, rates, gpus=gpus, tokens=batch - batch % sequence_length, sequence_length=sequence_length,
            per_node=gpus_per_node, memory=usable, routes=routes, space=space,
        )  # fmt: skip
        found = ask(best=best, system=MOVES if moves else None)
        if not found.plans:
            raise ValueError(why_none(found))
        shown = Shown(found, shape, rates, routes, min(gpus_per_node, gpus), model, usable, command())
        console, why = terminal(150), shown.why()
        shown.print(console, why)
        if out is not None:
            texts = shown.write_files(out)
            shown.write_page(out / "plan.html", why, texts[0])
            console.print(
                f"wrote {out / 'plan.html'} and {len(texts)} files for carpool train --config", highlight=False
            )
        if policy:
            found_by = {name: ask(best=1, system=PLANNERS[name]) for name in policy}
            print_policies(shown.first, found_by, console)


def number_of(text: str) -> int:
    """Of "4M" (4 * 2**20), "512K" (512 * 2**10) or digits.

    Raises:
        ValueError: it is none."""
    found = re.fullmatch(r"\s*([0-9][0-9_,]*)\s*([KkMm]?)\s*", text)
    if found is None:
        raise ValueError(f"--tokens-per-batch {text!r}: expected a number such as 4194304, 512K or 4M")
    return int(found[1].replace(",", "").replace("_", "")) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]
