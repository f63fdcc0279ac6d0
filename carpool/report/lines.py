"""A chart of lines, over steps or anything else: axes, grid, lines, bands, points, marks, and values under the pointer.

The vertical axis begins at zero unless the caller says otherwise; a logarithmic one says so in its unit. Values above
`top` are cut off and marked by a small triangle at the upper edge.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from carpool.report.svg import MARGIN_EM, WIDTH, axis_text, colour, legend, log_ticks, num, svg, tag, ticks

_TOP, _BOTTOM, _RIGHT = 10, 40, 12

MARKS = {"mark": "experts moved", "muted": "resumed"}
"""What a vertical line means, by its role."""


@dataclass(frozen=True)
class Line:
    """One series. `style`: line, thin (raw data beneath another line), dash (predicted), point (few measurements).

    y is NaN where nothing was measured; `upper` reaches a band from y up to it.
    """

    name: str
    role: str
    x: np.ndarray
    y: np.ndarray
    style: str = "line"
    upper: np.ndarray | None = None


@dataclass(frozen=True)
class Chart:
    """What a chart shows besides its lines.

    Attributes:
        alt: what it is, in words.
        unit: of the vertical axis, written above it.
        text: of a value under the pointer.
        zero: the vertical axis begins at zero.
        low: or it reaches down to this.
        top: values above it are cut off; None: it holds all.
        log: a logarithmic axis; only for values above zero.
        marks: vertical lines, (step, role).
        height: in units (a chart is WIDTH wide).
        tick: text of a tick of the vertical axis.
        across: what the horizontal axis counts.
        across_text: of a value of it.
    """

    alt: str
    unit: str
    text: Callable[[float], str]
    zero: bool = True
    low: float | None = None
    top: float | None = None
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()
    height: int = 200
    tick: Callable[[float], str] = axis_text
    across: str = "step"
    across_text: Callable[[float], str] = axis_text


def draw(chart: Chart, lines: Sequence[Line]) -> str | None:
    """The chart as HTML; None if no line has a number."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    low, high = _range(chart, lines)
    y_ticks = log_ticks(low, high) if chart.log else ticks(low, high)
    left = 8 + MARGIN_EM * max((len(chart.tick(t)) for t in y_ticks), default=1)
    first = min(float(line.x.min()) for line in lines)
    last = max(float(line.x.max()) for line in lines)
    last = max(last, first + 1)
    floor = chart.height - _BOTTOM

    def px(x: np.ndarray | float) -> np.ndarray:
        return left + (np.asarray(x, float) - first) / (last - first) * (WIDTH - _RIGHT - left)

    def py(y: np.ndarray | float) -> np.ndarray:
        known = np.asarray(y, float)
        if chart.log:
            with np.errstate(invalid="ignore", divide="ignore"):
                share = (np.log10(known) - math.log10(low)) / (math.log10(high) - math.log10(low))
        else:
            share = (known - low) / (high - low)
        return floor - np.clip(share, 0, 1) * (floor - _TOP)

    parts = []
    for tick in y_ticks:
        y = float(py(tick))
        parts.append(tag("line", class_="grid", x1=left, x2=float(WIDTH - _RIGHT), y1=y, y2=y))
        parts.append(tag("text", chart.tick(tick), x=left - 6, y=y + 4, text_anchor="end"))
    for tick in ticks(first, last, 6, whole=True):
        text, x = chart.across_text(tick), float(px(tick))
        anchor = "end" if x + 4 * len(text) > WIDTH else "middle"
        parts.append(tag("text", text, x=x, y=float(floor + 18), text_anchor=anchor))
    parts.append(
        tag("text", chart.across, class_="axis", x=(left + WIDTH - _RIGHT) / 2, y=floor + 34.0, text_anchor="middle")
    )
    for at, role in chart.marks:
        if first <= at <= last:
            x = float(px(at))
            style = f"stroke: {colour(role)}"
            parts.append(tag("line", class_=f"mark {role}", x1=x, x2=x, y1=float(_TOP), y2=float(floor), style=style))
    for line in lines:
        parts += _drawn(line, px(line.x), py(line.y), py(line.upper) if line.upper is not None else None)
        if chart.top is not None:
            over = px(line.x[line.y > chart.top])
            parts += [_triangle(float(x), line.role) for x in over]
    shown = [_hover(line, px(line.x), py(line.y), chart) for line in lines]
    hover = {"top": _TOP, "floor": floor, "across": chart.across, "lines": shown}
    entries = [(line.name, line.role, line.style) for line in lines if line.name]
    if entries:
        entries += [(text, role, "bar") for role, text in MARKS.items() if any(m[1] == role for m in chart.marks)]
    key = legend(entries) if len(entries) > 1 or any(line.style == "dash" for line in lines) else ""
    unit = f'<p class="unit">{html.escape(chart.unit)}</p>'
    return f"{key}{unit}{svg(parts, chart.height, chart.alt, hover)}"


def _range(chart: Chart, lines: Sequence[Line]) -> tuple[float, float]:
    values = np.concatenate([line.y for line in lines] + [line.upper for line in lines if line.upper is not None])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if chart.top is not None:
        high = min(high, chart.top)
    if chart.log:
        return low / 1.15, max(high, low * 1.01) * 1.15
    if chart.low is not None:
        low = min(low, chart.low)
    if chart.zero:
        low = min(low, 0.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    fixed = chart.zero or chart.low is not None
    return (low if fixed and low == (chart.low if chart.low is not None else 0.0) else low - room), high + room


def _drawn(line: Line, x: np.ndarray, y: np.ndarray, upper: np.ndarray | None) -> list[str]:
    stroke = f"stroke: {colour(line.role)}"
    fill = f"fill: {colour(line.role)}"
    known = np.isfinite(y)
    parts = [tag("path", class_="thin" if line.style == "point" else line.style, d=_path(x, y), style=stroke)]
    if upper is not None and (both := known & np.isfinite(upper)).any():
        there = " ".join(f"{num(a)} {num(b)}" for a, b in zip(x[both], upper[both], strict=True))
        back = " ".join(f"{num(a)} {num(b)}" for a, b in zip(x[both][::-1], y[both][::-1], strict=True))
        parts.insert(0, tag("path", class_="band", d=f"M{there} L{back}Z", style=fill))
    # A lone point between gaps would be invisible as a line.
    if line.style == "point" or (line.style != "dash" and known.sum() == 1):
        kind, r = ("point", 4) if line.style == "point" else (None, 3)
        dots = zip(x[known], y[known], strict=True)
        parts += [tag("circle", class_=kind, cx=float(a), cy=float(b), r=r, style=fill) for a, b in dots]
    return parts


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """A line with gaps where y is no number."""
    parts, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if math.isfinite(b):
            parts.append(f"{pen}{num(float(a))} {num(float(b))}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _triangle(x: float, role: str) -> str:
    d = f"M{num(x - 4)} {_TOP + 3}L{num(x + 4)} {_TOP + 3}L{num(x)} {_TOP - 4}Z"
    return tag("path", class_="over", d=d, style=f"fill: {colour(role)}")


def _hover(line: Line, x: np.ndarray, y: np.ndarray, chart: Chart) -> dict[str, object]:
    """What the pointer shows of a line: places, and texts."""
    known = np.isfinite(y)
    shown = [chart.text(float(v)) for v in line.y[known]]
    if line.upper is not None:
        shown = [f"{a}, p99 {chart.text(float(b))}" for a, b in zip(shown, line.upper[known], strict=True)]
    return {
        "name": line.name,
        "role": line.role,
        "point": line.style == "point",
        "x": [round(float(v), 1) for v in x[known]],
        "y": [round(float(v), 1) for v in y[known]],
        "at": [_place(float(v), chart) for v in line.x[known]],
        "text": shown,
    }


def _place(value: float, chart: Chart) -> str:
    """A place on the horizontal axis, in full where it is a step."""
    if chart.across_text is not axis_text:
        return chart.across_text(value)
    return f"{value:g}" if value == int(value) else f"{value:.1f}"
