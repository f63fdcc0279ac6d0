"""What `carpool simulate` found, as tables for a terminal, and as a page (simulation.html.j2).

Beside the page are the step's profile (`simulated_profile`), which `carpool profile --show` compares with a
measured one, and its trace for Perfetto.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from carpool.planner.search.why import NAMES
from carpool.planner.simulator.goodput import Failures
from carpool.planner.simulator.simulate import Simulation
from carpool.planner.step.events import COMPUTATION, HOST, STREAM_OF, Event, Execution
from carpool.planner.step.events import KINDS as KINDS_OF_EVENTS
from carpool.plugins.counted import counted
from carpool.profile.numbers import Profile, measure, save_profile
from carpool.profile.rank_trace import KINDS, OTHER, STEP, Label, Piece, Recorded
from carpool.report.charts import Chart, Line, draw_lanes, draw_lines
from carpool.report.profile_page import lanes_legend, profile_path, write_profile
from carpool.report.units import MISSING, count_text, ms_text, percent_text
from carpool.report.write import fill, write_page

SIZES = ("GPUs", "Degrees", "Balanced", "Drawn", "Bounds", "Tokens/s of a GPU", "Efficiency", "Fullest rank", "Memory")
TROUBLES = ("What", "Step", "Longer by")
KIND_COLUMNS = ("Kind", "Exposed on the fullest rank", "On the critical path")

Rows = list[list[str]]


def write_simulation(found: Simulation, folder: Path, about: Mapping[str, str], advice: str = "") -> Path:
    """Write simulation.html, simulation.json, profile.html and the folder profile/ of a simulation; returns the page.

    Args:
        about: what was simulated, and where each input of it is from.
        advice: what to do if the step scales badly.

    Raises:
        ValueError: a file cannot be written. ImportError: jinja2 is missing."""
    try:
        (folder / "profile").mkdir(parents=True, exist_ok=True)
        profile = simulated_profile(found.execution, dict(about))
        save_profile(profile, profile_path(folder))
        write_simulated_trace(found.execution, folder / "profile" / "trace.json.gz")
        record = {"about": dict(about), **found.record()}
        (folder / "simulation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); name another folder with --out") from None
    write_profile(folder)
    return write_page(folder / "simulation.html", "page", lambda: _page(found, profile, about, advice))


def _page(found: Simulation, profile: Profile, about: Mapping[str, str], advice: str) -> str:
    last = found.sizes[-1]
    return fill(
        "simulation.html.j2",
        headline=headline(found),
        explanation=explanation(found, advice),
        gpus=f"{last.gpus:,}",
        facts=_facts(found),
        scaling=_scaling(found),
        size_columns=SIZES,
        sizes=size_rows(found),
        svg=draw_lanes(profile, 1e3 * last.drawn, "simulated step"),
        legend=lanes_legend([profile]),
        kind_columns=KIND_COLUMNS,
        kinds=kind_rows(found),
        trouble_columns=TROUBLES,
        troubles=trouble_rows(found),
        trouble_gpus=f"{found.trouble_gpus:,}",
        failures=[] if found.failures is None else failure_rows(found.failures),
        goodput=None if found.failures is None else _goodput(found.failures),
        about=about,
    )


def headline(found: Simulation) -> str:
    """The step, and how well it scales."""
    last, first = found.sizes[-1], found.sizes[0]
    scaling = f"; each does {percent_text(last.efficiency)} of the work that it does among {first.gpus:,}"
    return (
        f"{counted(last.gpus, 'GPU')} take{'s' if last.gpus == 1 else ''} {_s(last.drawn)} for a step "
        f"({_s(last.low)} to {_s(last.high)}), {count_text(found.throughput)} tokens per second"
        f"{scaling if len(found.sizes) > 1 else ''}."
    )


def explanation(found: Simulation, advice: str = "") -> list[str]:
    """Sentences: where the step goes, what to do about it, and where the wall-clock time goes."""
    kinds = sorted(found.exposed, key=lambda kind: -found.exposed[kind])[:3]
    most = ", ".join(f"{NAMES[kind]} {percent_text(found.exposed[kind] / found.sizes[-1].drawn)}" for kind in kinds)
    exposed = percent_text(found.communication)
    said = [f"The step goes to {most}, and more. Communication that nothing hides is {exposed} of it.", advice]
    if found.failures is not None:
        steps = found.failures.goodput(found.failures.daly)
        saved = steps * found.failures.checkpoint / found.failures.daly
        said.append(
            f"With {found.failures.per_day:.2g} failures a day, {percent_text(steps)} of the wall-clock time goes to "
            f"training steps whose work stays, {percent_text(saved)} to checkpoints, and "
            f"{percent_text(1 - steps - saved)} to restarts and lost work."
        )
    return [one for one in said if one]


def _facts(found: Simulation) -> list[tuple[str, str, str]]:
    """Label, value, detail."""
    last, first = found.sizes[-1], found.sizes[0]
    waits = last.drawn - last.balanced
    facts = [
        ("Step", _s(last.drawn), f"{_s(last.low)} to {_s(last.high)}, all bounds at once"),
        ("Efficiency", percent_text(last.efficiency), f"tokens per second of a GPU, by those of {first.gpus:,} GPUs"),
        ("Exposed communication", percent_text(found.communication), "of the step, on the fullest rank"),
        ("Ranks that differ", percent_text(waits / last.drawn), f"{_s(waits)} more than if all ranks were alike"),
    ]
    if found.failures is not None:
        failures = found.failures
        detail = f"of the time goes to steps whose work stays, with a checkpoint every {_minutes(failures.daly)}"
        facts.append(("Goodput", percent_text(failures.goodput(failures.daly)), detail))
    return facts


def size_rows(found: Simulation) -> Rows:
    """Of `SIZES`."""
    return [
        [
            f"{one.gpus:,}", one.label, _s(one.balanced), _s(one.drawn), f"{_s(one.low)} to {_s(one.high)}",
            count_text(one.tokens_per_second), percent_text(one.efficiency), f"{one.imbalance:.3f}",
            MISSING if one.memory is None else f"{one.memory / 2**30:.1f} GiB",
        ]
        for one in found.sizes
    ]  # fmt: skip


def trouble_rows(found: Simulation) -> Rows:
    """Of `TROUBLES`."""
    # z: what rounds to nothing is +0.0, not -0.0.
    return [[one.what, _s(one.step), f"{100 * one.longer:+z.1f} %"] for one in found.troubles]


def kind_rows(found: Simulation) -> Rows:
    """Of `KIND_COLUMNS`."""
    step = found.sizes[-1].drawn

    def cell(seconds: float) -> str:
        return f"{_s(seconds)} ({percent_text(seconds / step)})" if seconds else "–"

    kinds = [kind for kind in (*KINDS_OF_EVENTS, "idle") if found.exposed.get(kind) or found.path.get(kind)]
    return [
        [NAMES.get(kind, kind), cell(found.exposed.get(kind, 0.0)), cell(found.path.get(kind, 0.0))] for kind in kinds
    ]


def failure_rows(failures: Failures) -> Rows:
    """What fails, and what to do about it."""
    record = failures.record()
    sampled, error = record["goodput_sampled"], record["goodput_sampled_error"]
    return [
        ["Mean time between failures", _minutes(failures.mtbf)],
        ["Failures a day", f"{failures.per_day:.2g}"],
        ["A checkpoint, a restart", f"{failures.checkpoint:g} s, {failures.restart:g} s"],
        ["Best interval between checkpoints (Daly)", _minutes(failures.daly)],
        ["The same by Young", f"{_minutes(failures.young)}, goodput {percent_text(record['goodput_young'])}"],
        ["Goodput by the formula", f"{100 * record['goodput']:.2f} %"],
        ["Goodput by drawn failures", f"{100 * sampled:.2f} % ± {100 * error:.2f}"],
    ]


def print_simulation(found: Simulation, console: Console, advice: str = "") -> None:
    """Tables for a terminal. `advice`: as of `write_simulation`."""
    for said in (headline(found), *explanation(found, advice)):
        console.print(said, highlight=False, markup=False, soft_wrap=said == advice)
    narrow = [SIZES.index(name) for name in ("GPUs", "Balanced", "Drawn", "Efficiency", "Fullest rank", "Memory")]
    sizes = [[row[at] for at in narrow] for row in size_rows(found)]
    tables: list[tuple[str, tuple[str, ...], Rows]] = [
        (f"Scaling, up to {found.sizes[-1].label}", tuple(SIZES[at] for at in narrow), sizes),
        ("The step by kind", KIND_COLUMNS, kind_rows(found)),
        (f"What goes wrong, at {found.trouble_gpus:,} GPUs", TROUBLES, trouble_rows(found)),
    ]
    if found.failures is not None:
        tables.append(("Failures", ("", ""), failure_rows(found.failures)))
    for title, columns, rows in tables:
        table = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left", show_header=any(columns))
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _scaling(found: Simulation) -> str | None:
    if len(found.sizes) < 2:
        return None
    doubled = np.log2([one.gpus for one in found.sizes])
    lines = [
        Line(name, role, doubled, np.array([getattr(one, of) for one in found.sizes]), style)
        for name, of, role, style in (
            ("drawn", "drawn", "loss", "line"), ("balanced", "balanced", "raw", "line"),
            ("bounds", "low", "predicted", "dash"), ("", "high", "predicted", "dash"),
        )
    ]  # fmt: skip
    first = found.sizes[0]
    ideal = np.full_like(doubled, first.drawn)
    lines.append(Line(f"ideal: the step of {first.gpus:,} GPUs", "muted", doubled, ideal, "thin"))
    chart = Chart(
        "Seconds of a step over the number of GPUs", "seconds of a step, both axes logarithmic", _s, log=True,
        across="GPUs", across_text=lambda power: f"{round(2**power):,}",
    )  # fmt: skip
    return draw_lines(chart, lines)


def _goodput(failures: Failures) -> str | None:
    power = np.linspace(math.log2(failures.daly) - 4, math.log2(failures.daly) + 4, 65)
    share = np.array([failures.goodput(2.0**one) for one in power])
    best = np.array([math.log2(failures.daly)]), np.array([failures.goodput(failures.daly)])
    chart = Chart(
        "Goodput over the interval between checkpoints", "goodput", percent_text, across="checkpoint every",
        across_text=lambda one: _minutes(2.0**one), top=1.0,
    )  # fmt: skip
    return draw_lines(chart, [Line("goodput", "loss", power, share), Line("Daly's interval", "mark", *best, "point")])


def _s(seconds: float) -> str:
    return ms_text(1e3 * seconds)


def _minutes(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def kind_of_event(event: Event) -> str:
    """Of `carpool.profile.rank_trace.KINDS`."""
    if event.kind in KINDS:
        return event.kind
    return "computation" if STREAM_OF[event.kind] == COMPUTATION else OTHER


def simulated_profile(execution: Execution, about: dict[str, str]) -> Profile:
    """The kept ranks of each stage as a profile, numbered as in the whole run, so that a simulated step is shown, and
    compared, as a measured one is. An event of the graph becomes a piece of work of a trace:

        dispatch, combine, experts, packing           themselves
        attention, dense, elementwise, loss, ...      computation
        gather, reduction, send, offload              other communication
        host                                          nothing: a profile shows streams of the device

    A collective lasts from the moment at which the rank is ready, as its kernel would: it waits for the others.

    Args:
        about: what was simulated, for a person."""
    numbers = []
    for rank, recorded in _ranks(execution):
        found = measure(recorded, rank)
        # Streams of the graph have names that say what runs there.
        lanes = [lane.model_copy(update={"name": lane.name.partition(":")[0]}) for lane in found.lanes]
        numbers.append(found.model_copy(update={"lanes": lanes}))
    return Profile(about=about, on_device=True, simulated=True, ranks=numbers)


def _ranks(execution: Execution) -> Iterator[tuple[int, Recorded]]:
    step = 0, round(1e9 * execution.step)
    with_experts = {event.layer for event in execution.graph.events if event.kind in ("dispatch", "experts")}
    for stage in range(execution.graph.stages):
        for at, rank in enumerate(execution.kept):
            pieces = []
            for event, start, end in _events(execution, stage, at):
                label = None
                if event.layer in with_experts:
                    label = Label(f"layers.{event.layer}", event.phase, event.name.rpartition("::")[2])
                span = round(1e9 * start), round(1e9 * end)
                pieces.append(Piece(*span, event.stream, kind_of_event(event), label))
            yield stage * execution.ranks + rank, Recorded(step, pieces, on_device=True)


def _events(execution: Execution, stage: int, at: int) -> Iterator[tuple[Event, float, float]]:
    """(event, start, end) of one rank's device."""
    times = zip(execution.graph.events, execution.arrive_EK[:, at], execution.end_EK[:, at], strict=True)
    for event, start, end in times:
        if event.stage == stage and event.kind != HOST and end > start:
            yield event, float(start), float(end)


def write_simulated_trace(execution: Execution, path: Path) -> None:
    """Write a Chrome trace (.json.gz) of the kept ranks for ui.perfetto.dev: a process for each, a thread for each
    stream. Events of the critical path are marked."""
    on_path = {(one.event.name, one.event.micro_batch, one.event.stage) for one in execution.path}
    events: list[dict[str, Any]] = []
    streams = list(dict.fromkeys(event.stream for event in execution.graph.events if event.kind != HOST))
    for stage in range(execution.graph.stages):
        for at, rank in enumerate(execution.kept):
            process = stage * execution.ranks + rank
            events.append(_named("process_name", process, 0, f"rank {process} (simulated)"))
            events += [_named("thread_name", process, number, name) for number, name in enumerate(streams)]
            step = {"ph": "X", "cat": "user_annotation", "name": STEP, "pid": process, "tid": -1, "ts": 0.0}
            events.append({**step, "dur": 1e6 * execution.step})
            for event, start, end in _events(execution, stage, at):
                told = {"kind": event.kind, "phase": event.phase, "micro-batch": event.micro_batch}
                if (event.name, event.micro_batch, stage) in on_path:
                    told["critical path"] = "yes"
                events.append({
                    "ph": "X", "cat": kind_of_event(event), "name": event.name, "pid": process,
                    "tid": streams.index(event.stream), "ts": round(1e6 * start, 3),
                    "dur": round(1e6 * (end - start), 3), "args": told,
                })  # fmt: skip
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file, separators=(",", ":"))


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
