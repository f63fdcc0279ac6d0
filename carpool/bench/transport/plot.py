"""One figure of a run: for each shape and routing, how long every contender took, and the ceiling as a line."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from carpool.bench.plot import BLUE, GREEN, ORANGE, RED, SKY, YELLOW, Bars, bars, write_grid
from carpool.bench.results import Result
from carpool.bench.transport.results import CaseResult

_SECTIONS = {
    "plan_dispatch": ("plan + dispatch", BLUE),
    "combine": ("combine", ORANGE),
    "dispatch_gradients": ("dispatch gradients", SKY),
    "combine_gradients": ("combine gradients", YELLOW),
    "decode": ("plan + dispatch + combine", GREEN),
}


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG. Bars are medians, whiskers reach to the 99th percentile."""
    cases = [case for case in result.cases if any(not row.unavailable for row in case.rows)]
    write_grid(result, path, cases, lambda case: (case.mode, case.shape), [_draw])


def _draw(axes: Axes, case: CaseResult) -> None:
    rows = [row for row in case.rows if not row.unavailable]
    groups = []
    for section in (shown := [name for name in _SECTIONS if name in rows[0].sections]):
        times = [row.sections[section] for row in rows]
        medians = [t.us_median for t in times]
        groups.append(Bars(*_SECTIONS[section], medians, medians, [t.us_p99 for t in times]))
    mode = "decode, " if case.mode == "decode" else ""
    title = f"{mode}{case.shape}, {case.routing} routing"
    places = bars(axes, [row.label for row in rows], groups, "us, slowest rank", title)
    if "plan_dispatch" in shown:
        cached, at = [row.sections["dispatch"].us_median for row in rows], places[shown.index("plan_dispatch")]
        axes.scatter(cached, at, marker="|", s=90, color="black", label="dispatch, cached plan", zorder=3)
    if case.ceiling is not None:
        axes.axvline(case.ceiling.us_median, color=RED, linestyle="--", label="copy engines, same rows")
    axes.legend(fontsize="small", loc="best")
