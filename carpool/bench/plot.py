"""The figures of all benchmarks: horizontal bars in a grid of axes, shapes down and routings across.

Needs matplotlib, which only figures do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carpool.bench.results import Result

# Of Okabe and Ito, told apart by colour-blind readers.
BLUE, ORANGE, SKY, YELLOW, GREEN, RED = "#0072B2", "#E69F00", "#56B4E9", "#F0E442", "#009E73", "#D55E00"


@dataclass(frozen=True)
class Bars:
    """One bar for each label. `low` and `high`: where its whisker ends."""

    legend: str
    color: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


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


def bars(axes: Axes, labels: Sequence[str], groups: Sequence[Bars], xlabel: str, title: str) -> list[list[float]]:
    """A bar of each group for each label, one above the other; returns where those of each group are."""
    height, places = 0.8 / max(1, len(groups)), []
    for number, group in enumerate(groups):
        places.append([i - 0.4 + (number + 0.5) * height for i in range(len(labels))])
        whiskers = None
        if group.low is not None and group.high is not None:
            ends = zip(group.low, group.values, group.high, strict=True)
            whiskers = list(zip(*((value - low, high - value) for low, value, high in ends), strict=True))
        style: dict[str, Any] = {"color": group.color, "label": group.legend, "ecolor": "0.4", "capsize": 2}
        axes.barh(places[-1], group.values, height, xerr=whiskers, **style)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return places
