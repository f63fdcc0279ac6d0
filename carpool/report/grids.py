"""The run's grids: load per layer and per expert over time, copies per layer, and the traffic from rank to rank.

Load is drawn relative to the mean load of the layer, so 1 means perfectly even. Traffic is drawn as the deviation from
the mean over all pairs of ranks: matrices that are nearly uniform look so, and what differs stands out.
"""

from __future__ import annotations

import re

import numpy as np

from carpool.report.cells import Grid, draw
from carpool.report.read import Run
from carpool.report.schema import Layers
from carpool.report.svg import HEAT_LEVELS, scale
from carpool.report.units import count_text, ms_text, plain_text

COLUMNS = 48
"""At most this many columns of time: beyond it, neighbouring steps share a column that shows the worst of them."""

NUMBERS = 8
"""Up to this many ranks, the traffic matrix has its numbers written into the cells."""

CELLS = 3072
"""A map of experts over time has at most about this many cells."""


def layer_names(run: Run, layers: int) -> list[str]:
    """Short names: "model.layers.3.mlp.experts" is "3", its place in the model; else the place among MoE layers."""
    found = [re.search(r"\.(\d+)\.", name) for name in run.info.model.moe_layers]
    numbers = [match.group(1) for match in found if match]
    return numbers if len(numbers) == layers == len(set(numbers)) else [str(i) for i in range(layers)]


def load_over_time(run: Run) -> str | None:
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
    grid = Grid(
        "The busiest expert of each layer over time",
        "layer",
        "step",
        layer_names(run, layers),
        [str(digests[int(g[0])].step) for g in groups],
        [[f"busiest expert {plain_text(v)}" for v in row] for row in worst_LX],
        suffix=" × the mean",
    )
    picture = draw(grid, _levels(worst_LX, np.geomspace(1, high, HEAT_LEVELS + 1)), "heat")
    return picture + scale("heat", "1 (even)", f"{plain_text(high)} × the mean")


def load_by_expert(run: Run) -> str | None:
    """Each expert's load over the mean of its layer, at the last recorded step; × marks an expert that nobody chose."""
    last = run.last_layers
    if last is None or not last.load or not last.load[0]:
        return None
    load_LE = np.array(last.load, dtype=float)
    names = layer_names(run, len(load_LE))
    return _loads(load_LE, "layer", names, "expert", [str(e) for e in range(load_LE.shape[1])])


def experts_over_time(run: Run, layer: int) -> str | None:
    """The load of each expert (rows) of one layer over the mean of its experts, at recorded steps (columns)."""
    found = [sample for sample in run.layer_samples if len(sample.load) > layer and sample.load[layer]]
    if not found:
        return None
    experts = len(found[-1].load[layer])
    found = [sample for sample in found if len(sample.load[layer]) == experts]
    found = _spread(found, max(8, min(COLUMNS, CELLS // experts)))
    load_XE = np.array([sample.load[layer] for sample in found], dtype=float)
    steps = [str(sample.step) for sample in found]
    return _loads(load_XE, "step", steps, "expert", [str(e) for e in range(experts)], turned=True)


def chosen_layers(run: Run, most: int = 4) -> list[tuple[int, str]]:
    """Layers (number, name) whose experts are drawn over time: all, or of many the most uneven one and some spread over
    the model."""
    if not run.layer_samples or not run.layers or not run.layers[-1].imbalance_L:
        return []
    imbalance_L = np.nan_to_num(np.array(run.layers[-1].imbalance_L))
    layers = len(imbalance_L)
    spread = np.linspace(0, layers - 1, most - 1).round().astype(int).tolist()
    chosen = range(layers) if layers <= most else sorted({int(imbalance_L.argmax()), *spread})
    names = layer_names(run, layers)
    return [(layer, names[layer]) for layer in chosen]


def ranks_over_time(run: Run, what: str) -> str | None:
    """Each rank's choices (`what`: load) or its milliseconds (experts, rides) over the mean of the ranks, at recorded
    steps."""
    values = [sample.rank_load if what == "load" else sample.rank_ms.get(what, []) for sample in run.layer_samples]
    ranks = len(values[-1]) if values else 0
    if ranks < 2:
        return None
    kept = [(sample.step, row) for sample, row in zip(run.layer_samples, values, strict=True) if len(row) == ranks]
    value_WX = np.array([row for _, row in kept], dtype=float).T
    mean_X = value_WX.mean(axis=0)
    relative_WX = np.divide(value_WX, mean_X, out=np.full_like(value_WX, np.nan), where=mean_X > 0) - 1
    if not np.isfinite(relative_WX).any():
        return None
    # One slow moment would make all others look alike.
    high = max(0.1, float(np.nanquantile(np.abs(relative_WX), 0.98)))
    told = count_text if what == "load" else ms_text
    grid = Grid(
        f"{what} of each rank over time",
        "rank",
        "step",
        [str(rank) for rank in range(ranks)],
        [str(step) for step, _ in kept],
        [
            [f"{told(a)}, {_percent(b)}" if np.isfinite(b) else None for a, b in zip(*pair, strict=True)]
            for pair in zip(value_WX, relative_WX, strict=True)
        ],
    )
    picture = draw(grid, _levels(relative_WX, np.linspace(-high, high, HEAT_LEVELS + 1)), "diverge")
    return picture + scale("diverge", _percent(-high), f"{_percent(high)} of the mean")


def _spread(samples: list[Layers], most: int) -> list[Layers]:
    if len(samples) <= most:
        return samples
    return [samples[i] for i in np.linspace(0, len(samples) - 1, most).round().astype(int)]


def _loads(
    load_YX: np.ndarray, row: str, rows: list[str], column: str, columns: list[str], turned: bool = False
) -> str:
    """Loads over the mean of their row. `turned`: rows of the data become columns of the picture."""
    mean_Y1 = load_YX.mean(axis=1, keepdims=True)
    relative_YX = np.divide(load_YX, mean_Y1, out=np.full_like(load_YX, np.nan), where=mean_Y1 > 0)
    high = max(2.0, float(np.nanmax(relative_YX))) if np.isfinite(relative_YX).any() else 2.0
    bounds = np.array([0, 0.25, 0.5, 0.75, 0.9, 1.1, *np.geomspace(1.1, high, 5)[1:]])
    dead_YX = load_YX == 0
    # The texts of a large grid are most of a page: its counts are left out.
    tokens = "{0} tokens, {1}" if load_YX.size <= CELLS else "{1}"
    texts = [
        [tokens.format(count_text(a), plain_text(b)) for a, b in zip(*pair, strict=True)]
        for pair in zip(load_YX, relative_YX, strict=True)
    ]
    if turned:
        load_YX, relative_YX, dead_YX = load_YX.T, relative_YX.T, dead_YX.T
        texts = [list(column) for column in zip(*texts, strict=True)]
        row, rows, column, columns = column, columns, row, rows
    grid = Grid(
        f"Load of each {column} by {row}", row, column, rows, columns, texts, cross_YX=dead_YX, suffix=" × the mean"
    )
    return draw(grid, _levels(relative_YX, bounds), "diverge") + scale("diverge", "0", f"{plain_text(high)} × the mean")


def traffic(run: Run) -> str | None:
    """Rows sent from each rank (rows) to each rank (columns) at the last recorded step, as deviation from the mean of
    all pairs; the diagonal stays at home."""
    if run.last_layers is None or len(run.last_layers.traffic_rows) < 2:
        return None
    rows_WW = np.array(run.last_layers.traffic_rows, dtype=float)
    ranks = len(rows_WW)
    away_WW = ~np.eye(ranks, dtype=bool)
    mean = float(rows_WW[away_WW].mean())
    if not mean:
        return None
    deviation_WW = np.where(away_WW, rows_WW / mean - 1, np.nan)
    high = max(0.1, float(np.nanmax(np.abs(deviation_WW))))
    names = [str(i) for i in range(ranks)]
    grid = Grid(
        "Traffic from rank to rank",
        "from rank",
        "to rank",
        names,
        [str(i) for i in range(ranks)],
        [
            [
                f"{count_text(rows_WW[i, j])} rows" + (f", {_percent(deviation_WW[i, j], 1)}" if i != j else " at home")
                for j in range(ranks)
            ]
            for i in range(ranks)
        ],
        written=[[_percent(v) if np.isfinite(v) else "" for v in row] for row in deviation_WW]
        if ranks <= NUMBERS
        else None,
    )
    picture = draw(grid, _levels(deviation_WW, np.linspace(-high, high, HEAT_LEVELS + 1)), "diverge", tallest=40)
    return (
        picture
        + scale("diverge", _percent(-high), _percent(high))
        + f'<p class="muted mean">Mean: {count_text(mean)} rows a pair.</p>'
    )


def _percent(share: float, digits: int = 0) -> str:
    """A deviation with its sign: 0.061 -> "+6 %"."""
    text = f"{abs(100 * share):.{digits}f} %"
    return text if float(text[:-2]) == 0 else ("+" if share > 0 else "\u2212") + text


def _levels(value_YX: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The interval of `bounds` that each value falls into, -1 for NaN; values outside get the first or the last.

    >>> _levels(np.array([[12.0]]), np.array([0, 10, 20, 30]))
    array([[1]])
    """
    level_YX = np.clip(np.searchsorted(bounds, value_YX, side="right") - 1, 0, len(bounds) - 2)
    return np.where(np.isfinite(value_YX), level_YX, -1)
