"""The figure of `carpool bench model`: a bar for each contender, a step's milliseconds by kind."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from carpool.bench.model.results import NAMES, Case
from carpool.bench.results import Result
from carpool.profile.kinds import IDLE, KINDS


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG."""
    case: Case = result.cases[0]
    rows = [row for row in case.rows if row.kinds]
    figure = Figure(figsize=(10, 1.6 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = colormaps["tab10"]
    left = [0.0] * len(rows)
    for number, kind in enumerate((*KINDS, IDLE)):
        widths = [next(one.ms for one in row.kinds if one.kind == kind) for row in rows]
        color = "0.9" if kind == IDLE else colors(number)
        axes.barh([row.label for row in rows], widths, left=left, label=NAMES[kind], color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, under the profiler")
    where = f"{case.layers} layers, {case.num_ranks} ranks, {case.tokens:,} tokens a rank"
    axes.set_title(f"{case.model}, {where}, {case.routing}")
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
