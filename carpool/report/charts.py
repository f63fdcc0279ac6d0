"""Every picture of the pages: lines over steps, grids of coloured cells, and a step as lanes of time.

A picture is a snippet of HTML: an optional legend, the `<svg>`, an optional key of colours. Four rules:

- Colours are the page's variables (`var(--loss)`, see ROLES), which it defines for light and for dark.
- Words that may be long (the unit of an axis, a legend) are HTML beside the `<svg>`, so they wrap and cannot overlap.
- All pictures are `WIDTH` units wide, but for lanes. A desktop's column shows a unit as about 1.2 px, a phone as
  0.85 px, where the page's style sheet enlarges the text; `MARGIN_EM` reckons with the larger one.
- What the pointer shows stands in the attribute `data-hover` as JSON, read by page.js. Nothing else moves, so a page
  without scripts, or on paper, loses only that.

Why not matplotlib: its SVG has one path per cell, so that the grid of 48 layers × 256 experts takes 2.1 MB, and here
0.15 MB without its values; its colours are fixed when the file is written; its text cannot be enlarged on a phone; and
it does not say where a value was drawn, which the pointer needs. Here cells of one colour are one path, and neighbours
of one colour in a row are one rectangle of it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carpool.profile.numbers import Profile
from carpool.report.units import ms_text

HEAT_LEVELS = 9

ROLES = (
    *("ink", "muted", "grid", "card", "dispatch", "experts", "combine", "rest", "loss", "raw", "heldout"),
    *("predicted", "limit", "mark", "other-run", "on-pale", "on-strong"),
    *(f"{ramp}{level}" for ramp in ("heat", "diverge") for level in range(HEAT_LEVELS)),
)
"""Every colour a picture may use; page.css defines each for both themes."""

WIDTH = 400
MARGIN_EM = 8.0
"""Units that one digit of an axis may take: 14-unit text, as on a phone."""


def colour(role: str) -> str:
    """The CSS value of a role."""
    assert role in ROLES, role
    return f"var(--{role})"


def tag(name: str, text: str | None = None, **attributes: Any) -> str:
    """An element: `tag("rect", x=1.234, class_="cells")` gives `<rect x="1.2" class="cells"/>`. Everything is escaped.

    None leaves an attribute out; floats are cut to tenths of a unit; `_` in a name stands for `-`."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = num(value) if isinstance(value, float) else html.escape(str(value), quote=True)
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    inside = " ".join(parts)
    return f"<{inside}/>" if text is None else f"<{inside}>{html.escape(text, quote=False)}</{name}>"


def num(value: float) -> str:
    """A coordinate in tenths: 12.0 -> "12"."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def svg(parts: Sequence[str], height: float, alt: str, hover: Any = None) -> str:
    """The `<svg>` of the page's width. `alt` describes it in words; `hover` is what page.js shows."""
    data = "" if hover is None else f' data-hover="{html.escape(json.dumps(hover, separators=(",", ":")), quote=True)}"'
    head = f'<svg class="figure" viewBox="0 0 {WIDTH} {num(height)}" role="img"'
    return f'{head} aria-label="{html.escape(alt, quote=True)}"{data}>' + "\n".join(["", *parts, "</svg>"])


def hover_cells(
    x: Sequence[float], w: float, y: float, h: float, rows: Sequence[str], columns: Sequence[str],
    text: Sequence[str | None], suffix: str = "",
) -> dict[str, Any]:  # fmt: skip
    """What page.js shows of a grid of cells: left edges, width, upper edge, height, names, and a text for each cell."""
    size = {"x": [round(left, 1) for left in x], "w": round(w, 1), "y": y, "h": round(h, 2)}
    return {**size, "rows": rows, "columns": columns, "text": text, "suffix": suffix}


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Names beside samples of their colour: (name, role, kind), kind one of line, thin, dash, point, area."""
    items = "".join(
        f'<li><i class="{kind}" style="color: {colour(role)}"></i>{html.escape(name)}</li>'
        for name, role, kind in entries
    )
    return f'<ul class="legend">{items}</ul>'


def scale(ramp: str, low: str, high: str) -> str:
    """The key of a grid's colours, from the first of `ramp`'s steps to the last."""
    steps = "".join(f'<i style="background: var(--{ramp}{i})"></i>' for i in range(HEAT_LEVELS))
    return f'<p class="scale muted">{html.escape(low)} <span>{steps}</span> {html.escape(high)}</p>'


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """At most `most` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 412)
    [0.0, 100.0, 200.0, 300.0, 400.0]
    """
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20, 50)):
        if whole and (step < 1 or step != int(step)):
            continue
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    return [low]


def every(least: float) -> int:
    """Of how many names one is written: the next of 1, 2, 5, 10, 20, ... that is at least `least`."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if step >= least:
                return step
        power *= 10


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 times them if those are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(found) >= 3:
            break
    # Less than a third of a decade has no such numbers: it is divided evenly.
    return found[:: -(-len(found) // 6)] if len(found) > 1 else ticks(low, high)


def axis_text(value: float) -> str:
    """A tick's label, short: 0.0012 -> "0.0012", 12000 -> "12k"."""
    if value and (abs(value) < 0.001 or abs(value) >= 1e6):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


# Lines

_TOP, _BOTTOM, _RIGHT = 10, 40, 12

MARKS = {"mark": "experts moved", "muted": "resumed"}
"""What a vertical line means, by its role."""


@dataclass(frozen=True)
class Line:
    """One series. `style`: line, thin (raw data beneath another line), dash (predicted), point (few measurements), or
    column (one for each whole x).

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


def draw_lines(chart: Chart, lines: Sequence[Line]) -> str | None:
    """The chart as HTML; None if no line has a number."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    low, high = _range(chart, lines)
    y_ticks = log_ticks(low, high) if chart.log else ticks(low, high)
    left = 8 + MARGIN_EM * max((len(chart.tick(t)) for t in y_ticks), default=1)
    first = min(float(line.x.min()) for line in lines)
    last = max(float(line.x.max()) for line in lines)
    # Half a column stands beyond the middle of the first and of the last one.
    for line in lines:
        if line.style == "column":
            first, last = min(first, float(line.x.min()) - 0.5), max(last, float(line.x.max()) + 0.5)
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
        if line.style == "column":
            parts += _columns(line, px(line.x), py(line.y), float(px(1.0) - px(0.0)), floor)
            continue
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


def _columns(line: Line, x: np.ndarray, y: np.ndarray, pitch: float, floor: float) -> list[str]:
    """A column is at most 48 units wide; `pitch`: from the middle of one to the middle of the next."""
    width = min(0.7 * pitch, 48.0)
    places = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    style = f"fill: {colour(line.role)}"
    return [tag("rect", x=a - width / 2, y=b, width=width, height=floor - b, style=style) for a, b in places]


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


# Grids


@dataclass(frozen=True)
class Grid:
    """A grid's words.

    Attributes:
        alt: what it is.
        row, column: what a row and a column is, for axes and the pointer: "layer", "expert".
        rows, columns: their names.
        text_YX: of each cell under the pointer; None: nothing. `suffix` follows each.
        written: the texts inside the cells; None: none.
        cross_YX: cells with a cross.
    """

    alt: str
    row: str
    column: str
    rows: Sequence[str]
    columns: Sequence[str]
    text_YX: Sequence[Sequence[str | None]]
    written: Sequence[Sequence[str]] | None = None
    cross_YX: np.ndarray | None = None
    suffix: str = ""


def draw_grid(grid: Grid, level_YX: np.ndarray, ramp: str, tallest: float = 26.0) -> str:
    """The grid as HTML. level_YX: the step of each cell, 0 to HEAT_LEVELS - 1, or -1 for a grey one.

    tallest: of a cell, in units; many rows make them lower."""
    height, width = level_YX.shape
    left = 8 + MARGIN_EM * max((len(name) for name in grid.rows), default=1)
    w = (WIDTH - 4 - left) / width
    h = max(1.5, min(tallest, w if grid.written else tallest, 330 / height))
    gap = 0.06 if w >= 6 and h >= 6 else 0.0
    top = 4.0
    floor = top + h * height
    x = [left + i * w for i in range(width)]
    parts = []
    for level in range(-1, HEAT_LEVELS):
        path = "".join(
            _rectangle(left + start * w, top + y * h, (stop - start) * w, h, gap * min(w, h))
            for y in range(height)
            for start, stop in _runs(level_YX[y] == level, joined=gap == 0.0)
        )
        if path:
            role = colour("grid" if level < 0 else f"{ramp}{level}")
            parts.append(tag("path", class_="cells", d=path, style=f"fill: {role}"))
    if grid.cross_YX is not None:
        r = min(3.5, 0.3 * min(w, h))
        crosses = "".join(
            f"M{num(cx - r)} {num(cy - r)}l{num(2 * r)} {num(2 * r)}m0 {num(-2 * r)}l{num(-2 * r)} {num(2 * r)}"
            for cx, cy in ((x[j] + w / 2, top + (i + 0.5) * h) for i, j in zip(*np.nonzero(grid.cross_YX), strict=True))
        )
        if crosses:
            parts.append(tag("path", class_="cross", d=crosses))
    if grid.written is not None:
        for i in range(height):
            for j in range(width):
                strong = level_YX[i, j] >= 0 and (
                    level_YX[i, j] in (0, 1, 7, 8) if ramp == "diverge" else level_YX[i, j] >= 5
                )
                style = f"fill: {colour('on-strong' if strong else 'on-pale')}"
                y = top + (i + 0.5) * h + 3.5
                text = grid.written[i][j]
                parts.append(tag("text", text, class_="cell", x=x[j] + w / 2, y=y, text_anchor="middle", style=style))
    parts += _names(grid, x, w, h, left, top, floor)
    rows = [f"{grid.row} {name}" for name in grid.rows]
    columns = [f"{grid.column} {name}" for name in grid.columns]
    texts = [text for row in grid.text_YX for text in row]
    hover = hover_cells(x, w, top, h, rows, columns, texts, grid.suffix)
    return f'<p class="unit">{html.escape(grid.row)}</p>{svg(parts, floor + 38, grid.alt, hover)}'


def _names(grid: Grid, x: Sequence[float], w: float, h: float, left: float, top: float, floor: float) -> list[str]:
    """Rows' names at the left, columns' below, as many as fit; then what a column is."""
    parts = []
    for i in range(0, len(grid.rows), every(16 / h)):
        parts.append(tag("text", grid.rows[i], x=left - 6, y=top + (i + 0.5) * h + 4, text_anchor="end"))
    widest = max(len(name) for name in grid.columns)
    for j in range(0, len(grid.columns), every(MARGIN_EM * (widest + 1.5) / w)):
        middle = min(x[j] + w / 2, WIDTH - MARGIN_EM * len(grid.columns[j]) / 2)
        parts.append(tag("text", grid.columns[j], x=middle, y=floor + 17, text_anchor="middle"))
    middle = (left + WIDTH - 4) / 2
    parts.append(tag("text", grid.column, class_="axis", x=middle, y=floor + 33, text_anchor="middle"))
    return parts


def _runs(hit_X: np.ndarray, joined: bool) -> list[tuple[int, int]]:
    """Neighbouring cells that are hit, as (first, one past the last); each for itself unless `joined`.

    >>> _runs(np.array([1, 1, 0, 1]), joined=True)
    [(0, 2), (3, 4)]
    """
    places = np.nonzero(hit_X)[0]
    if not joined:
        return [(int(i), int(i) + 1) for i in places]
    groups = np.split(places, np.nonzero(np.diff(places) > 1)[0] + 1)
    return [(int(g[0]), int(g[-1]) + 1) for g in groups if len(g)]


def _rectangle(x: float, y: float, w: float, h: float, gap: float) -> str:
    return f"M{num(x + gap)} {num(y + gap)}h{num(w - 2 * gap)}v{num(h - 2 * gap)}h{num(2 * gap - w)}z"


# Lanes

KINDS_OF_WORK = {
    "dispatch": "ride: dispatch",
    "combine": "ride: combine",
    "experts": "experts",
    "packing": "packing for rides",
    "computation": "other computation",
    "other": "other communication",
}
"""Kinds of work, as the legend says them, in its order."""

_LEFT, _ACROSS, _LANE, _GAP, _AXIS = 256, 1000, 16, 4, 24


def draw_lanes(profile: Profile, until_ms: float, name: str) -> str:
    """The picture. `until_ms`: what the width stands for; equal in pictures that are to be compared."""
    scale = _ACROSS / until_ms
    rows: list[str] = []
    y = _GAP
    for one in profile.ranks:
        rows.append(f'<text class="rank" x="0" y="{y + _LANE - 3}">rank {one.rank}</text>')
        for lane in one.lanes:
            end = one.times.step * scale
            rows.append(f'<text x="{_LEFT - 8}" y="{y + _LANE - 3}" text-anchor="end">{html.escape(lane.name)}</text>')
            rows.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{end:.2f}" height="{_LANE}"/>')
            for start, stop, kind, label in lane.runs:
                what = KINDS_OF_WORK.get(kind, kind) + (f": {label}" if label else "")
                told = html.escape(f"{what}, {ms_text(stop - start)} from {start:.2f} ms")
                place = f'x="{_LEFT + start * scale:.2f}" y="{y}" width="{(stop - start) * scale:.2f}"'
                rows.append(f'<rect class="{html.escape(kind)}" {place} height="{_LANE}" data-tip="{told}"/>')
            y += _LANE + _GAP
        y += 2 * _GAP
    marks = [
        f'<line x1="{_LEFT + at * scale:.2f}" x2="{_LEFT + at * scale:.2f}" y1="0" y2="{y}"/>'
        f'<text x="{_LEFT + at * scale:.2f}" y="{y + 14}" text-anchor="middle">{at:g}</text>'
        for at in ticks(0, until_ms, 11)
    ]
    alt = html.escape(f"{name}: lanes of {len(profile.ranks)} ranks over {profile.mean().step:.1f} milliseconds")
    return (
        f'<svg class="lanes" viewBox="0 0 {_LEFT + _ACROSS + 20} {y + _AXIS}" role="img" aria-label="{alt}">\n'
        + "\n".join([*marks, *rows])
        + f'\n<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">ms</text>\n</svg>'
    )
