"""Figures of cells: load per layer over time, load per expert, and the traffic from rank to rank.

Cells are coloured in nine steps, each a variable of the page. Cells of one step are one SVG path, which keeps a grid of
48 layers × 256 experts small. Load is drawn relative to the mean load of the layer, so 1 means perfectly even.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from carpool.report.read import Run
from carpool.report.svg import HEAT_LEVELS, drawing, role
from carpool.report.units import count_text, plain_text

COLUMNS = 48
"""At most this many columns of time: beyond it, neighbouring steps share a column that shows the worst of them."""

NUMBERS = 8
"""Up to this many ranks, the traffic matrix has its numbers written into the cells."""


@dataclass(frozen=True)
class Scale:
    """The key of a grid's colours, which the page writes below it: from the first of `ramp`'s steps to the last."""

    ramp: str
    low: str
    high: str


def _cells(axes: Axes, value_YX: np.ndarray, bounds: Sequence[float] | np.ndarray, ramp: str, gap: float) -> np.ndarray:
    """Draws value_YX as squares (NaN: none) coloured by the interval of `bounds` they fall into; returns the steps.

    `bounds=[0, 10, 20, ...]`: a value of 12 gets the second step. Values outside get the first or the last.
    """
    level_YX = np.clip(np.searchsorted(bounds, value_YX, side="right") - 1, 0, HEAT_LEVELS - 1)
    for level in range(HEAT_LEVELS):
        outlines = []
        for y, x in zip(*np.nonzero((level_YX == level) & np.isfinite(value_YX)), strict=True):
            outlines.append(_square(x, y, gap))
        if outlines:
            patch = PathPatch(Outline.make_compound_path(*outlines), facecolor=role(f"{ramp}{level}"), linewidth=0)
            patch.set_gid("cells")
            axes.add_artist(patch)
    height, width = value_YX.shape
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return level_YX


def _square(x: float, y: float, gap: float) -> Outline:
    left, right, low, high = x + gap, x + 1 - gap, y + gap, y + 1 - gap
    return Outline([(left, low), (right, low), (right, high), (left, high), (left, low)], closed=True)


def _label(ticks_set: object, names: Sequence[str], most: int) -> None:
    """Names the centres of cells along one axis, skipping evenly so that at most about `most` names are written."""
    every = max(1, -(-len(names) // most))
    chosen = range(0, len(names), every)
    ticks_set([i + 0.5 for i in chosen], [names[i] for i in chosen])  # type: ignore[operator]


def layer_names(run: Run, layers: int) -> list[str]:
    """Short names: "model.layers.3.mlp.experts" is "3", its place in the model; else the place among MoE layers."""
    found = [re.search(r"\.(\d+)\.", name) for name in run.info.model.moe_layers]
    numbers = [match.group(1) for match in found if match]
    return numbers if len(numbers) == layers == len(set(numbers)) else [str(i) for i in range(layers)]


def _height(rows: int) -> float:
    return min(5.0, 0.75 + max(0.17 * rows, 0.5))


def load_over_time(run: Run) -> tuple[Figure, Scale] | None:
    """The busiest expert's load over the mean load, for each layer (rows) and recorded step (columns)."""
    digests = [d for d in run.layers if d.imbalance_L]
    if not digests:
        return None
    layers = len(digests[-1].imbalance_L)
    digests = [d for d in digests if len(d.imbalance_L) == layers]
    groups = np.array_split(np.arange(len(digests)), min(COLUMNS, len(digests)))
    imbalance_SL = np.array([d.imbalance_L for d in digests], dtype=float)
    worst_LX = np.array([np.fmax.reduce(imbalance_SL[g], axis=0) for g in groups]).T
    high = max(2.0, float(np.nanmax(worst_LX))) if np.isfinite(worst_LX).any() else 2.0
    with drawing(_height(layers)) as (figure, axes):
        _cells(axes, worst_LX, np.geomspace(1, high, HEAT_LEVELS + 1), "heat", gap=0.0)
        _label(axes.set_xticks, [str(digests[int(g[0])].step) for g in groups], 8)
        _label(axes.set_yticks, layer_names(run, layers), 14)
        axes.set_xlabel("step")
        axes.set_ylabel("layer")
    return figure, Scale("heat", "1 (even)", f"{plain_text(high)}× the mean")


def load_by_expert(run: Run) -> tuple[Figure, Scale] | None:
    """Each expert's load over the mean of its layer, at the last recorded step; × marks an expert that nobody chose."""
    if run.last_layers is None or not run.last_layers.load or not run.last_layers.load[0]:
        return None
    load_LE = np.array(run.last_layers.load, dtype=float)
    mean_L1 = load_LE.mean(axis=1, keepdims=True)
    relative_LE = np.divide(load_LE, mean_L1, out=np.full_like(load_LE, np.nan), where=mean_L1 > 0)
    layers, experts = load_LE.shape
    high = max(2.0, float(np.nanmax(relative_LE))) if np.isfinite(relative_LE).any() else 2.0
    bounds = [0, 0.25, 0.5, 0.75, 0.9, 1.1, *np.geomspace(1.1, high, 5)[1:]]
    with drawing(_height(layers)) as (figure, axes):
        _cells(axes, relative_LE, bounds, "diverge", gap=0.05 if experts <= 64 else 0.0)
        dead_l, dead_e = np.nonzero(load_LE == 0)
        axes.plot(dead_e + 0.5, dead_l + 0.5, "x", color=role("ink"), markersize=min(4.0, 160 / experts))
        _label(axes.set_xticks, [str(i) for i in range(experts)], 16 if experts <= 100 else 10)
        _label(axes.set_yticks, layer_names(run, layers), 14)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
    return figure, Scale("diverge", "0", f"{plain_text(high)}× the mean")


def traffic(run: Run) -> tuple[Figure, Scale] | None:
    """Rows sent from each rank (rows) to each rank (columns) at the last recorded step; the diagonal stays at home."""
    if run.last_layers is None or len(run.last_layers.traffic_rows) < 2:
        return None
    rows_WW = np.array(run.last_layers.traffic_rows, dtype=float)
    ranks = len(rows_WW)
    away_WW = rows_WW.copy()
    np.fill_diagonal(away_WW, np.nan)
    high = max(1.0, float(np.nanmax(away_WW)))
    with drawing(min(4.4, 1.2 + 0.55 * ranks)) as (figure, axes):
        level_WW = _cells(axes, away_WW, np.linspace(0, high, HEAT_LEVELS + 1), "heat", gap=0.03)
        home = [_square(i, i, gap=0.03) for i in range(ranks)]
        axes.add_artist(PathPatch(Outline.make_compound_path(*home), facecolor=role("grid"), linewidth=0))
        if ranks <= NUMBERS:
            for i in range(ranks):
                for j in range(ranks):
                    ink = "muted" if i == j else "on-strong" if level_WW[i, j] >= HEAT_LEVELS // 2 else "on-pale"
                    axes.text(
                        j + 0.5, i + 0.5, count_text(rows_WW[i, j]), color=role(ink), ha="center", va="center", size=8.5
                    )
        names = [str(i) for i in range(ranks)]
        _label(axes.set_xticks, names, 16)
        _label(axes.set_yticks, names, 16)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
    return figure, Scale("heat", "0 rows", f"{count_text(high)} rows")
