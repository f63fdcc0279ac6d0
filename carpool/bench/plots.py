"""The figures of all benchmarks: horizontal bars, in a grid of axes with shapes down and routings across.

Needs matplotlib, which only figures do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carpool.bench.model.model_results import NAMES
from carpool.bench.result_files import Result
from carpool.profile.kinds import IDLE, KINDS

# Of Okabe and Ito, told apart by colour-blind readers.
BLUE, ORANGE, SKY, YELLOW, GREEN, RED = "#0072B2", "#E69F00", "#56B4E9", "#F0E442", "#009E73", "#D55E00"
_SECTIONS = {
    "plan_dispatch": ("plan + dispatch", BLUE),
    "combine": ("combine", ORANGE),
    "dispatch_gradients": ("dispatch gradients", SKY),
    "combine_gradients": ("combine gradients", YELLOW),
    "decode": ("plan + dispatch + combine", GREEN),
}
_PASSES = {
    "forward": ("forward", SKY),
    "backward": ("backward", BLUE),
    "forward_backward": ("forward + backward", GREEN),
}
_MEMORY = {"saved_bytes": ("saved between forward and backward", ORANGE), "peak_bytes": ("peak", RED)}


@dataclass(frozen=True)
class _Bars:
    """One bar for each label. `low` and `high`: where its whisker ends."""

    legend: str
    color: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def write_rides(result: Result, path: Path) -> None:
    """Of `carpool bench transport`: bars are medians, whiskers reach to the 99th percentile, the ceiling is a line."""
    _write_grid(result, path, lambda case: (case.mode, case.shape), [_draw_rides])


def write_experts(result: Result, path: Path) -> None:
    """Of experts and layers: rates or times, and memory. Whiskers reach from the 10th to the 90th percentile."""
    _write_grid(result, path, lambda case: case.shape, [_draw_speed, _draw_memory])


def write_steps(result: Result, path: Path) -> None:
    """Of `carpool bench model`: a bar for each contender, a step's milliseconds by kind."""
    case = result.cases[0]
    rows = [row for row in case.rows if row.kinds]
    figure = Figure(figsize=(10, 1.6 + 0.6 * len(rows)), layout="constrained")
    axes, colors, left = figure.subplots(), colormaps["tab10"], [0.0] * len(rows)
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


def _write_grid(
    result: Result,
    path: Path,
    row_of: Callable[[Any], Hashable],
    draw: Sequence[Callable[[Axes, Any, list[Any]], None]],
) -> None:
    """A row of axes for each value of `row_of(case)`, in it for each routing one for each of `draw`, which gets the
    contenders that ran."""
    cases = [case for case in result.cases if any(row.sections for row in case.rows)]
    rows = list(dict.fromkeys(map(row_of, cases)))
    routings = list(dict.fromkeys(case.routing for case in cases))
    columns = len(draw) * max(1, len(routings))
    figure = Figure(figsize=(6.5 * columns, 0.6 + 3.4 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots(max(1, len(rows)), columns, squeeze=False)
    for case in cases:
        for number, one in enumerate(draw):
            place = axes[rows.index(row_of(case)), len(draw) * routings.index(case.routing) + number]
            one(place, case, [row for row in case.rows if row.sections])
            place.legend(fontsize="small", loc="best")
    where = result.environment
    figure.suptitle(f"{where['device_count']} x {where['device']}, {result.settings['dtype']}", fontsize="medium")
    figure.savefig(path, dpi=130)


def _draw_bars(axes: Axes, rows: list[Any], groups: Sequence[_Bars], xlabel: str, title: str) -> list[list[float]]:
    """A bar of each group for each contender, one above the other; returns where those of each group are."""
    height, places = 0.8 / max(1, len(groups)), []
    for number, group in enumerate(groups):
        places.append([i - 0.4 + (number + 0.5) * height for i in range(len(rows))])
        whiskers = None
        if group.low is not None and group.high is not None:
            ends = zip(group.low, group.values, group.high, strict=True)
            whiskers = list(zip(*((value - low, high - value) for low, value, high in ends), strict=True))
        style: dict[str, Any] = {"color": group.color, "label": group.legend, "ecolor": "0.4", "capsize": 2}
        axes.barh(places[-1], group.values, height, xerr=whiskers, **style)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return places


def _draw_rides(axes: Axes, case: Any, rows: list[Any]) -> None:
    groups = []
    for section in (shown := [name for name in _SECTIONS if name in rows[0].sections]):
        times = [row.sections[section] for row in rows]
        medians = [t.us_median for t in times]
        groups.append(_Bars(*_SECTIONS[section], medians, medians, [t.us_p99 for t in times]))
    mode = "decode, " if case.mode == "decode" else ""
    places = _draw_bars(axes, rows, groups, "us, slowest rank", f"{mode}{case.shape}, {case.routing} routing")
    if "plan_dispatch" in shown:
        cached, at = [row.sections["dispatch"].us_median for row in rows], places[shown.index("plan_dispatch")]
        axes.scatter(cached, at, marker="|", s=90, color="black", label="dispatch, cached plan", zorder=3)
    if case.ceiling is not None:
        axes.axvline(case.ceiling.us_median, color=RED, linestyle="--", label="copy engines, same rows")


def _draw_speed(axes: Axes, case: Any, rows: list[Any]) -> None:
    """Milliseconds of layers, rates of experts alone."""
    layer, groups = any(row.transport for row in rows), []
    for section in (name for name in _PASSES if name in rows[0].sections):
        times = [row.sections[section] for row in rows]
        middle, low, high = ([getattr(t, f"ms_{name}") for t in times] for name in ("median", "p10", "p90"))
        if not layer:
            flop = [t.tflops * t.ms_median for t in times]
            middle, high, low = ([a / b for a, b in zip(flop, ms, strict=True)] for ms in (middle, low, high))
        groups.append(_Bars(*_PASSES[section], middle, low, high))
    unit = "ms, slowest rank" if layer else "TFLOP/s"
    _draw_bars(axes, rows, groups, unit, f"{case.shape}, {case.routing} routing")
    if case.peak_flops and not layer:
        axes.axvline(case.peak_flops / 1e12, color=RED, linestyle="--", label="peak of the datasheet")


def _draw_memory(axes: Axes, _: Any, rows: list[Any]) -> None:
    groups = [
        _Bars(*about, [(getattr(row, name) or 0) / 2**20 for row in rows])
        for name, about in _MEMORY.items()
        if any(getattr(row, name) is not None for row in rows)
    ]
    _draw_bars(axes, rows, groups, "MiB beyond input and weights", "memory")
