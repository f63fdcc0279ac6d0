"""`carpool plan`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.cli.common import Debug, check_output, command, errors

if TYPE_CHECKING:
    from carpool.planner.machine.hardware import Hardware
    from carpool.planner.model.routes import Routes
    from carpool.planner.model.shape import ModelShape
    from carpool.planner.search.plan import Found, Plan

GiB = 2**30
MAX_TOKENS = 2**40
COLUMNS = ("", "configuration", "step, s", "interval", "MFU", "tokens/s per GPU", "GiB", "exposed")


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
        from carpool.planner.machine.hardware import find_hardware
        from carpool.planner.model.routes import Routes
        from carpool.planner.model.shape import ModelShape
        from carpool.planner.search.plan import plan as search
        from carpool.planner.search.space import MOVES, PLANNERS, Space, read_constraints
        from carpool.plugins.nearest import nearest
        from carpool.train.config.published import read_keys
        from carpool.train.config.schema_parallelism import MAX_RANKS
        from carpool.train.config.sizes import size_of

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
            guess = nearest(unknown[0], list(PLANNERS))
            raise ValueError(
                f"--policy {unknown[0]} is not known; there are {', '.join(sorted(PLANNERS))}"
                f"{f'; did you mean {guess}?' if guess else ''}"
            )
        space = read_constraints(
            Space(
                moments=moments,
                max_grad_norm=max_grad_norm,
                optimizer_in_backward=Space.optimizer_in_backward if max_grad_norm else (False, True),
            ),
            only or (),
        )
        ask = partial(
            search, shape, rates, gpus=gpus, tokens=batch - batch % sequence_length, sequence_length=sequence_length,
            per_node=gpus_per_node, memory=usable, routes=routes, space=space,
        )  # fmt: skip
        found = ask(best=best, system=MOVES if moves else None)
        if not found.plans:
            raise ValueError(_why_none(found))
        _show(found, shape, rates, routes, min(gpus_per_node, gpus), model, usable, out)
        if policy:
            _show_policies(found.plans[0], {name: ask(best=1, system=PLANNERS[name]) for name in policy})


def _show_policies(best: Plan, found: Mapping[str, Found]) -> None:
    """What published planners would have chosen, beside the plan."""
    from carpool.bench.result_files import print_table, terminal
    from carpool.planner.search.space import PLANNERS

    console, rows = terminal(150), []
    for name, one in found.items():
        if not one.plans:
            rows.append([name, _why_none(one), *["–"] * 5])
            continue
        chosen = one.plans[0]
        longer = chosen.prediction.seconds.middle / best.prediction.seconds.middle - 1
        rows.append([name, *_row(0, chosen)[1:4], f"{100 * longer:+.1f} %", *_row(0, chosen)[6:]])
    columns = ["", "configuration", "step, s", "interval", "beside the plan", "GiB", "exposed"]
    print_table(console, "published planners, by the same model of costs", columns, rows, long=1)
    for name in found:
        console.print(f"{name}: {PLANNERS[name].chooses} ({PLANNERS[name].source})", highlight=False)


def _why_none(found: Found) -> str:
    if found.least_memory < float("inf"):
        return (
            f"no configuration fits: the least that one needs is {found.least_memory / GiB:.1f} GiB a rank; use more "
            "GPUs, shorter sequences, or --moments bfloat16"
        )
    refused = "; ".join(f"{why} ({number:,})" for why, number in found.refused.items())
    refused = refused or "the GPUs cannot be divided so"
    return f"no configuration is allowed: {refused}; change --gpus, --tokens-per-batch or --only"


def number_of(text: str) -> int:
    """Of "4M" (4 * 2**20), "512K" (512 * 2**10) or digits.

    Raises:
        ValueError: it is none."""
    found = re.fullmatch(r"\s*([0-9][0-9_,]*)\s*([KkMm]?)\s*", text)
    if found is None:
        raise ValueError(f"--tokens-per-batch {text!r}: expected a number such as 4194304, 512K or 4M")
    return int(found[1].replace(",", "").replace("_", "")) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def _row(number: int, one: Plan) -> list[str]:
    seconds, mfu = one.prediction.seconds, one.prediction.mfu
    return [
        str(number), one.candidate.label, f"{seconds.middle:.3g}", f"{seconds.low:.3g} to {seconds.high:.3g}",
        "–" if mfu is None else f"{100 * mfu.middle:.1f} %", f"{one.prediction.tokens_per_second():,.0f}",
        f"{one.memory.total / GiB:.1f}", f"{one.prediction.communication:.3g}",
    ]  # fmt: skip


def _show(
    found: Found,
    shape: ModelShape,
    rates: Hardware,
    routes: Routes,
    per_node: int,
    model: str,
    usable: float | None,
    out: Path | None,
) -> None:
    from carpool.bench.result_files import print_table, terminal
    from carpool.planner.candidate import toml_text
    from carpool.planner.search.plan import USABLE
    from carpool.planner.search.why import NAMES, bounded_by, changes, in_words, next_best, with_all_memory

    console = terminal(150)
    first = found.plans[0]
    rows = [_row(i + 1, one) for i, one in enumerate(found.plans)]
    name = model if "/" not in model else Path(model).stem
    title = f"{name} on {first.candidate.degrees.world_size} x {rates.name}, {first.candidate.tokens:,} tokens a step"
    print_table(console, title, list(COLUMNS), rows, long=1)
    why = [
        ("The step goes to", bounded_by(first)),
        ("Its memory is highest", f"{first.memory.at}, stage {first.memory.stage}"),
        ("Next best of another kind", next_best(found.plans)),
        *([("With all of the memory", tight)] if (tight := with_all_memory(found, rates.capacity or 0)) else []),
        *((f"With {what}", text) for what, text in changes(found.plans, shape, rates, per_node, routes)),
    ]
    words = in_words(first, per_node)
    console.print(" ".join(words), highlight=False)
    for question, answer in why:
        console.print(f"{question}: {answer}", highlight=False)
    counts = ", ".join(f"{number:,} {what}" for what, number in found.counts.items())
    console.print(f"searched in {found.seconds:.1f} s: {counts}", highlight=False)
    for reason, number in found.refused.items():
        console.print(f"not allowed, {number:,}: {reason}", highlight=False)
    console.print("; ".join(f"{what}: {source}" for what, source in first.inputs.items()), highlight=False)
    if out is None:
        return
    from carpool.report.plan_page import PlanPage, write_plan

    out.mkdir(parents=True, exist_ok=True)
    texts = []
    for i, one in enumerate(found.plans):
        settings = one.candidate.settings()
        settings["model"]["config"] = model
        settings["parallelism"]["ranks_per_node"] = per_node
        texts.append(toml_text(settings))
        (out / f"plan-{i + 1}.toml").write_text(texts[-1])
    _check([out / f"plan-{i + 1}.toml" for i in range(len(texts))])
    seconds, mfu = first.prediction.seconds, first.prediction.mfu
    step = sum(first.prediction.exposed.values())
    usable_bytes = USABLE * (rates.capacity or first.memory.total) if usable is None else usable
    page = PlanPage(
        title=title,
        verdict=(
            f"The best of {len(found.plans)} configurations takes {seconds.middle:.3g} s for a step "
            f"({seconds.low:.3g} to {seconds.high:.3g} s): "
            f"{first.prediction.tokens_per_second():,.0f} tokens per second of a GPU, "
            f"with {first.memory.total / GiB:.1f} of {usable_bytes / GiB:.1f} GiB."
        ),
        words=words,
        facts=[
            ("Step", f"{seconds.middle:.3g} s", f"{seconds.low:.3g} to {seconds.high:.3g} s"),
            ("MFU", "–" if mfu is None else f"{100 * mfu.middle:.1f} %",
             "" if mfu is None else f"{100 * mfu.low:.0f} to {100 * mfu.high:.0f} %"),
            ("Tokens per second", f"{first.prediction.tokens_per_second():,.0f}", "of one GPU"),
            ("GPU hours", f"{1e12 / first.prediction.tokens_per_second() / 3600:,.0f}", "for 10¹² tokens"),
            ("Memory", f"{first.memory.total / GiB:.1f} GiB", f"of a rank, {first.memory.at}"),
            *([("Host memory", f"{per_node * first.memory.host / GiB:,.0f} GiB", f"of a node of {per_node}")]
              if first.memory.host else []),
            ("Exposed communication", f"{first.prediction.communication:.3g} s", "a step"),
        ],
        columns=COLUMNS,
        rows=rows,
        steps=[(one.candidate.label, one.prediction.seconds) for one in found.plans],
        share=sorted(
            ((NAMES.get(k, k), v / step) for k, v in first.prediction.exposed.items() if v > 0.0005 * step),
            key=lambda one: -one[1],
        ),
        memory=sorted(first.memory.parts.items(), key=lambda one: -one[1]),
        capacity=usable_bytes,
        timeline=first.memory.timeline,
        why=why,
        inputs=first.inputs,
        toml=texts[0],
        command=command(),
    )  # fmt: skip
    write_plan(page, out / "plan.html")
    console.print(f"wrote {out / 'plan.html'} and {len(texts)} files for carpool train --config", highlight=False)


def _check(files: list[Path]) -> None:
    """What was written is what the trainer takes. Raises ValueError if not."""
    from carpool.train.config import load_config

    for path in files:
        load_config(path)
