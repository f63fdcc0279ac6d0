"""One figure of a run: for each shape and routing, how long every contender took, and the ceiling as a line."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from carpool.bench.plot import BLUE, GREEN, ORANGE, RED, SKY, YELLOW, bars, finish, write_grid
from carpool.bench.results import Result
from carpool.bench.transport.results import CaseResult

# Section, legend, colour, place of the bar within its group.
_BARS = (
    ("plan_dispatch", "plan + dispatch", BLUE, 0.0),
    ("combine", "combine", ORANGE, 1.0),
    ("dispatch_gradients", "dispatch gradients", SKY, 2.0),
    ("combine_gradients", "combine gradients", YELLOW, 3.0),
    ("decode", "plan + dispatch + combine", GREEN, 0.0),
)
_CACHED = "dispatch"


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG. Bars are medians, whiskers reach to the 99th percentile."""
    cases = [case for case in result.cases if any(not row.unavailable for row in case.rows)]
    write_grid(result, path, cases, lambda case: (case.mode, case.shape), [_draw])


def _draw(axes: Axes, case: CaseResult) -> None:
    rows = [row for row in case.rows if not row.unavailable]
    shown = [bar for bar in _BARS if bar[0] in rows[0].sections]
    for section, legend, color, place in shown:
        times = [row.sections[section] for row in rows]
        # The 99th percentile is never below the median.
        whisker = ([0.0] * len(times), [t.us_p99 - t.us_median for t in times])
        at = bars(axes, [t.us_median for t in times], place, len(shown), color, legend, whisker)
        if section == "plan_dispatch":
            cached = [row.sections[_CACHED].us_median for row in rows]
            axes.scatter(cached, at, marker="|", s=90, color="black", label="dispatch, cached plan", zorder=3)
    if case.ceiling is not None:
        axes.axvline(case.ceiling.us_median, color=RED, linestyle="--", label="copy engines, same rows")
    mode = "decode, " if case.mode == "decode" else ""
    title = f"{mode}{case.shape}, {case.routing} routing"
    finish(axes, [row.label for row in rows], "us, slowest rank", title)
