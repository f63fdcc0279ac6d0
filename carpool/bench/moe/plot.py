"""Figures of experts and layers: for each shape and routing the rates (or times), and the memory, of all contenders."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from carpool.bench.moe.results import CaseResult, Row
from carpool.bench.plot import BLUE, GREEN, ORANGE, RED, SKY, bars, finish, write_grid
from carpool.bench.results import Result

_PASSES = (
    ("forward", "forward", SKY),
    ("backward", "backward", BLUE),
    ("forward_backward", "forward + backward", GREEN),
)


def write_plot(result: Result, path: Path) -> None:
    """Write the figure as PNG. Bars are medians, whiskers reach from the 10th to the 90th percentile."""
    cases = [case for case in result.cases if _measured(case)]
    write_grid(result, path, cases, lambda case: case.shape, [_draw_speed, _draw_memory])


def _measured(case: CaseResult) -> list[Row]:
    return [row for row in case.rows if row.sections]


def _draw_speed(axes: Axes, case: CaseResult) -> None:
    rows = _measured(case)
    layer = any(row.transport for row in rows)
    passes = [one for one in _PASSES if one[0] in rows[0].sections]
    for place, (section, legend, color) in enumerate(passes):
        times = [row.sections[section] for row in rows]
        low, middle, high = (
            [getattr(t, f"ms_{name}") if layer else t.tflops * t.ms_median / getattr(t, f"ms_{name}") for t in times]
            for name in ("p10", "median", "p90")
        )
        if not layer:
            low, high = high, low
        errors = (
            [m - one for m, one in zip(middle, low, strict=True)],
            [one - m for m, one in zip(middle, high, strict=True)],
        )
        bars(axes, middle, place, len(passes), color, legend, errors)
    if case.peak_flops and not layer:
        axes.axvline(case.peak_flops / 1e12, color=RED, linestyle="--", label="peak of the datasheet")
    unit = "ms, slowest rank" if layer else "TFLOP/s"
    finish(axes, [row.label for row in rows], unit, f"{case.shape}, {case.routing} routing")


def _draw_memory(axes: Axes, case: CaseResult) -> None:
    rows = _measured(case)
    shown = [
        (legend, color, [(getattr(row, name) or 0) / 2**20 for row in rows])
        for name, legend, color in (
            ("saved_bytes", "kept between forward and backward", ORANGE),
            ("peak_bytes", "peak", RED),
        )
        if any(getattr(row, name) is not None for row in rows)
    ]
    for place, (legend, color, values) in enumerate(shown):
        bars(axes, values, place, len(shown), color, legend)
    finish(axes, [row.label for row in rows], "MiB beyond input and weights", "memory")
