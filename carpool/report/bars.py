"""Bars: copies per token of each layer as columns, memory of a rank as rows.

What was predicted is hollow with a dashed outline, what was measured is solid. Bars begin at zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.planner.memory.held import BESIDE_TENSORS
from carpool.report.grids import layer_names
from carpool.report.read import Run
from carpool.report.svg import MARGIN_EM, WIDTH, axis_text, colour, every, hover_cells, legend, svg, tag, ticks
from carpool.report.units import plain_text

_TOP, _HEIGHT = 10.0, 150.0


def copies_by_layer(run: Run) -> str | None:
    """Copies per token of each layer, the mean over the last tenth of the recorded steps."""
    found = [d.copies_L for d in run.layers if d.copies_L]
    found = [copies_L for copies_L in found if len(copies_L) == len(found[-1])]
    if not found:
        return None
    last = np.array(found[-max(1, len(found) // 10) :], dtype=float)
    copies_L = last.mean(axis=0)
    uniform = run.info.predicted.copies_per_token_uniform
    return columns(copies_L, layer_names(run, len(copies_L)), uniform)


def columns(value_L: np.ndarray, names: Sequence[str], predicted: float | None) -> str:
    """One column per layer, and a dashed line for what is predicted of all."""
    high = 1.08 * max(float(np.nanmax(value_L)), predicted or 0.0, 1e-9)
    marks = ticks(0, high)
    left = 8 + MARGIN_EM * max(len(axis_text(t)) for t in marks)
    floor = _TOP + _HEIGHT
    w = (WIDTH - 4 - left) / len(value_L)
    gap = max(0.15 * w, (w - 48) / 2)

    def y(value: float) -> float:
        return floor - _HEIGHT * value / high

    parts = []
    for tick in marks:
        parts.append(tag("line", class_="grid", x1=left, x2=float(WIDTH - 4), y1=y(tick), y2=y(tick)))
        parts.append(tag("text", axis_text(tick), x=left - 6, y=y(tick) + 4, text_anchor="end"))
    written = every(MARGIN_EM * (max(map(len, names)) + 1.5) / w)
    for i, value in enumerate(value_L):
        x = left + i * w
        if np.isfinite(value):
            style = f"fill: {colour('dispatch')}"
            parts.append(tag("rect", x=x + gap, y=y(value), width=w - 2 * gap, height=floor - y(value), style=style))
        if i % written == 0:
            parts.append(tag("text", names[i], x=x + w / 2, y=floor + 17, text_anchor="middle"))
    parts.append(tag("text", "layer", class_="axis", x=(left + WIDTH) / 2, y=floor + 33, text_anchor="middle"))
    key = ""
    if predicted is not None:
        d = f"M{left:.1f} {y(predicted):.1f}H{WIDTH - 4}"
        parts.append(tag("path", class_="dash", d=d, style=f"stroke: {colour('predicted')}"))
        key = legend([("measured", "dispatch", "area"), (f"predicted (uniform): {predicted:.2f}", "predicted", "dash")])
    texts = [plain_text(float(v), 3) for v in value_L]
    lefts = [left + i * w for i in range(len(value_L))]
    hover = hover_cells(lefts, w, _TOP, _HEIGHT, ["copies per token"], [f"layer {name}" for name in names], texts)
    return key + '<p class="unit">copies per token</p>' + svg(parts, floor + 38, "Copies per token by layer", hover)


def memory(run: Run) -> list[tuple[str, float, str, float]]:
    """Bytes per rank, predicted component by component, and the measured peak: name, bytes, kind, share of the largest.

    On GPUs PyTorch's tensors are measured, and what is in use beside them is not: then their predicted sum stands
    beside it. Components that are empty are left out, and so is everything if nothing is known."""
    sizes = run.info.predicted.memory_per_rank_bytes
    pieces = [(name, size) for name, size in sizes.items() if name != "total" and size]
    if not pieces and (total := sizes.get("total")):
        pieces = [("total", total)]
    rows = [(name.replace("_", " "), size, "predicted") for name, size in pieces]
    if len(pieces) > 1:
        rows.append(("predicted in all", sum(size for _, size in pieces), "predicted sum"))
    tensors = [size for name, size in pieces if name not in BESIDE_TENSORS]
    alone = " of tensors" if len(tensors) < len(pieces) else ""
    if alone:
        rows.append(("predicted of tensors", sum(tensors), "predicted sum"))
    if (peak := run.memory_peak) is not None:
        rows.append((f"measured peak{alone}", peak, "measured sum"))
    most = max((size for _, size, _ in rows), default=1.0)
    return [(*row, row[1] / max(most, 1.0)) for row in rows]
