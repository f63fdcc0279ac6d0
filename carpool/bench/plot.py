"""One figure of a run: for each shape and routing, how long every contender took, and the ceiling as a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from carpool.bench.results import CaseResult, Result

# Section, legend, colour (of Okabe and Ito, told apart by colour-blind readers), place of the bar within its group.
_BARS = (
    ("plan_dispatch", "plan + dispatch", "#0072B2", 0.0),
    ("combine", "combine", "#E69F00", 1.0),
    ("dispatch_gradients", "dispatch gradients", "#56B4E9", 2.0),
    ("combine_gradients", "combine gradients", "#F0E442", 3.0),
    ("decode", "plan + dispatch + combine", "#009E73", 0.0),
)
_CACHED = "dispatch"


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG. Bars are medians, whiskers reach to the 99th percentile."""
    cases = [case for case in result.cases if any(not row.unavailable for row in case.rows)]
    shapes = list(dict.fromkeys((case.mode, case.shape) for case in cases))
    routings = list(dict.fromkeys(case.routing for case in cases))
    figure = Figure(figsize=(6.5 * len(routings), 0.6 + 3.4 * len(shapes)), layout="constrained")
    axes = figure.subplots(len(shapes), len(routings), squeeze=False)
    for case in cases:
        _draw(axes[shapes.index((case.mode, case.shape)), routings.index(case.routing)], case)
    where = result.environment
    figure.suptitle(f"{where['device_count']} x {where['device']}, {result.settings['dtype']}", fontsize="medium")
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, case: CaseResult) -> None:
    rows = [row for row in case.rows if not row.unavailable]
    bars = [bar for bar in _BARS if bar[0] in rows[0].sections]
    height = 0.8 / len(bars)
    for section, legend, color, place in bars:
        times = [row.sections[section] for row in rows]
        median = [t.us_median for t in times]
        # The 99th percentile is never below the median.
        whisker = [[0.0] * len(times), [t.us_p99 - t.us_median for t in times]]
        at = [i - 0.4 + (place + 0.5) * height for i in range(len(rows))]
        axes.barh(at, median, height, color=color, label=legend, xerr=whisker, ecolor="0.4", capsize=2)
        if section == "plan_dispatch":
            cached = [row.sections[_CACHED].us_median for row in rows]
            axes.scatter(cached, at, marker="|", s=90, color="black", label="dispatch, cached plan", zorder=3)
    if case.ceiling is not None:
        axes.axvline(case.ceiling.us_median, color="#D55E00", linestyle="--", label="copy engines, same rows")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("us, slowest rank")
    mode = "decode, " if case.mode == "decode" else ""
    axes.set_title(f"{mode}{case.shape}, {case.routing} routing", fontsize="medium", loc="left")
    axes.legend(fontsize="small", loc="best")
    axes.spines[["top", "right"]].set_visible(False)
