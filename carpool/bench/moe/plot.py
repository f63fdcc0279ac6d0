"""Figures of experts and layers: for each shape and routing the rates (or times), and the memory, of all contenders."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from carpool.bench.moe.results import CaseResult
from carpool.bench.plot import BLUE, GREEN, ORANGE, RED, SKY, Bars, bars, write_grid
from carpool.bench.results import Result

_PASSES = {
    "forward": ("forward", SKY),
    "backward": ("backward", BLUE),
    "forward_backward": ("forward + backward", GREEN),
}
_MEMORY = {"saved_bytes": ("kept between forward and backward", ORANGE), "peak_bytes": ("peak", RED)}


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG. Bars are medians, whiskers reach from the 10th to the 90th percentile."""
    cases = [case for case in result.cases if any(row.sections for row in case.rows)]
    write_grid(result, path, cases, lambda case: case.shape, [_draw_speed, _draw_memory])


def _draw_speed(axes: Axes, case: CaseResult) -> None:
    """Milliseconds of layers, rates of experts alone."""
    rows = [row for row in case.rows if row.sections]
    layer, groups = any(row.transport for row in rows), []
    for section in (name for name in _PASSES if name in rows[0].sections):
        times = [row.sections[section] for row in rows]
        middle, low, high = ([getattr(t, f"ms_{name}") for t in times] for name in ("median", "p10", "p90"))
        if not layer:
            flop = [t.tflops * t.ms_median for t in times]
            middle, high, low = ([a / b for a, b in zip(flop, ms, strict=True)] for ms in (middle, low, high))
        groups.append(Bars(*_PASSES[section], middle, low, high))
    unit = "ms, slowest rank" if layer else "TFLOP/s"
    bars(axes, [row.label for row in rows], groups, unit, f"{case.shape}, {case.routing} routing")
    if case.peak_flops and not layer:
        axes.axvline(case.peak_flops / 1e12, color=RED, linestyle="--", label="peak of the datasheet")
    axes.legend(fontsize="small", loc="best")


def _draw_memory(axes: Axes, case: CaseResult) -> None:
    rows = [row for row in case.rows if row.sections]
    groups = [
        Bars(*about, [(getattr(row, name) or 0) / 2**20 for row in rows])
        for name, about in _MEMORY.items()
        if any(getattr(row, name) is not None for row in rows)
    ]
    bars(axes, [row.label for row in rows], groups, "MiB beyond input and weights", "memory")
    axes.legend(fontsize="small", loc="best")
