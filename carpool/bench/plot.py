"""What the figures of all benchmarks have in common: bar charts in a grid, shapes down and routings across.

Needs matplotlib, which only figures do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carpool.bench.results import Result

# Of Okabe and Ito, told apart by colour-blind readers.
BLUE, ORANGE, SKY, YELLOW, GREEN, RED = "#0072B2", "#E69F00", "#56B4E9", "#F0E442", "#009E73", "#D55E00"


def write_grid(
    result: Result,
    path: Path,
    cases: Sequence[Any],
    row_of: Callable[[Any], Hashable],
    draw: Sequence[Callable[[Axes, Any], None]],
) -> None:
    """Write a PNG: a row of axes for each value of `row_of(case)`, in it for each routing one for each of `draw`."""
    rows = list(dict.fromkeys(map(row_of, cases)))
    routings = list(dict.fromkeys(case.routing for case in cases))
    columns = len(draw) * max(1, len(routings))
    figure = Figure(figsize=(6.5 * columns, 0.6 + 3.4 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots(max(1, len(rows)), columns, squeeze=False)
    for case in cases:
        for number, one in enumerate(draw):
            one(axes[rows.index(row_of(case)), len(draw) * routings.index(case.routing) + number], case)
    where = result.environment
    figure.suptitle(f"{where['device_count']} x {where['device']}, {result.settings['dtype']}", fontsize="medium")
    figure.savefig(path, dpi=130)


def bars(
    axes: Axes,
    values: Sequence[float],
    place: float,
    of: int,
    color: str,
    legend: str,
    errors: tuple[Sequence[float], Sequence[float]] | None = None,
) -> list[float]:
    """One horizontal bar for each label, number `place` of the `of` that share it; returns where they are.

    Args:
        errors: how far the whiskers reach, below and above.
    """
    height = 0.8 / of
    at = [i - 0.4 + (place + 0.5) * height for i in range(len(values))]
    axes.barh(at, values, height, color=color, label=legend, xerr=errors, ecolor="0.4", capsize=2)
    return at


def finish(axes: Axes, labels: Sequence[str], xlabel: str, title: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.legend(fontsize="small", loc="best")
    axes.spines[["top", "right"]].set_visible(False)
