"""Pictures that live inside an HTML page: drawn as text, coloured by the page, with values under the pointer.

A picture is a snippet of HTML: an optional legend, the `<svg>`, an optional key of colours. Four rules:

- Colours are the page's variables (`var(--loss)`, see ROLES), which it defines for light and for dark.
- Words that may be long (the unit of an axis, a legend) are HTML beside the `<svg>`, so they wrap and cannot overlap.
- All pictures are `WIDTH` units wide. A desktop's column shows a unit as about 1.2 px, a phone as 0.85 px, where the
  page's style sheet enlarges the text; `MARGIN_EM` reckons with the larger one.
- What the pointer shows stands in the attribute `data-hover` as JSON, read by page.js. Nothing else moves, so a page
  without scripts, or on paper, loses only that.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

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
