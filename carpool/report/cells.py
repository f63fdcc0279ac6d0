"""A grid of coloured cells, with values under the pointer.

Cells are coloured in nine steps, each a variable of the page. Cells of one step are one path, and neighbours of one
step in a row are one rectangle of it, which keeps a grid of 48 layers × 256 experts small.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from carpool.report.svg import HEAT_LEVELS, MARGIN_EM, WIDTH, colour, every, hover_cells, num, svg, tag


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


def draw(grid: Grid, level_YX: np.ndarray, ramp: str, tallest: float = 26.0) -> str:
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
