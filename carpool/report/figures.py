"""The pictures of a run's report: curves over steps, loads and traffic as grids, ranks per token, and memory.

Long runs are thinned to what the width can show: the mean of neighbouring steps. A dashed line is a prediction, a thin
dotted vertical line is a place where the run resumed, a solid one where experts moved.

Load is drawn relative to the mean load of the layer, so 1 means perfectly even. Traffic is drawn as the deviation from
the mean over all pairs of ranks: matrices that are nearly uniform look so, and what differs stands out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from carpool.planner.step.sizes import NOT_TENSORS
from carpool.report.charts import (
    HEAT_LEVELS,
    Chart,
    Grid,
    Line,
    draw_grid,
    draw_lines,
    scale,
)  # fmt: skip
from carpool.report.read import Run
from carpool.report.record_types import PARTS, Layers, Train, median
from carpool.report.units import count_text, ms_text, percent_text, plain_text

POINTS = 400
"""More than this many steps are thinned: about one point per unit of the axes."""


def series(train: Sequence[Train], value: Callable[[Train], float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values as floats, NaN where nothing finite was measured, thinned to at most POINTS means."""
    steps = np.array([t.step for t in train], dtype=float)
    return thinned(steps, values_of(train, value))


def values_of(train: Sequence[Train], value: Callable[[Train], float | None]) -> np.ndarray:
    """One value per step, NaN where nothing finite was measured."""
    values = np.array([math.nan if (v := value(t)) is None else v for t in train], dtype=float)
    values[~np.isfinite(values)] = math.nan
    return values


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of neighbours, at most POINTS of them."""
    if len(steps) <= POINTS:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), POINTS)
    return np.array([steps[g].mean() for g in groups]), np.array([_mean(values[g]) for g in groups])


def smoothed(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The mean of each value's neighbourhood, and how many steps that spans (odd, about a twentieth of the run).

    The neighbourhood shrinks at both ends, where it stays centred; what is no number is left out."""
    half = max(2, len(values) // 40)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    first, stop = at - reach, at + reach + 1
    count = counts[stop] - counts[first]
    mean = np.divide(sums[stop] - sums[first], count, out=np.full(len(values), math.nan), where=count > 0)
    return np.where(known, mean, math.nan), 2 * half + 1


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _marks(run: Run) -> list[tuple[float, str]]:
    """Where the run resumed, and where experts moved."""
    resumed = [(float(entry.from_step), "muted") for entry in run.info.history if entry.from_step]
    return resumed + [(float(p.step), "mark") for p in run.placements if p.event == "moved"]


def _recorded(run: Run, chart: Chart, value: Callable[[Train], float | None], role: str = "experts") -> str | None:
    """One line of what each step recorded."""
    return draw_lines(chart, [Line("", role, *series(run.train, value))])


def loss(run: Run) -> str | None:
    """Training loss of each step, its smoothed course, and held-out loss as points."""
    steps = np.array([t.step for t in run.train], dtype=float)
    values = values_of(run.train, lambda t: t.loss)
    smooth, span = smoothed(values)
    lines = [Line("training, each step", "raw", *thinned(steps, values), style="thin")]
    if np.isfinite(values).sum() > span:
        lines.append(Line(f"training, mean of {span} steps", "loss", *thinned(steps, smooth)))
    lines += held_out(run, "held out", "heldout")
    about = "Training loss and held-out loss over steps"
    return draw_lines(Chart(about, "nats per token", lambda v: plain_text(v, 4), zero=False, marks=_marks(run)), lines)


def held_out(run: Run, name: str, role: str) -> list[Line]:
    """Held-out losses as points, if there are any."""
    held = [(e.step, e.loss) for e in run.evals if e.loss is not None and math.isfinite(e.loss)]
    if not held:
        return []
    steps, losses = np.array(held, dtype=float).T
    return [Line(name, role, steps, losses, style="point")]


def learning_rate(run: Run) -> str | None:
    """The learning rate of each step."""
    return _recorded(run, Chart("learning rate", "learning rate", lambda v: f"{v:.3g}"), lambda t: t.learning_rate)


def balance_loss(run: Run) -> str | None:
    """The auxiliary loss, before it is weighed."""
    chart = Chart("Balance loss over steps", "balance loss, unweighed", lambda v: plain_text(v, 4), zero=False)
    return _recorded(run, chart, lambda t: t.aux_loss, "combine")


def plugin_metric(run: Run, name: str) -> str | None:
    """A metric of a plug-in package (`carpool.metrics.metric`)."""
    chart = Chart(f"{name} over steps", run.info.metrics[name].get("unit", ""), lambda v: f"{v:.4g}", zero=False)
    return _recorded(run, chart, lambda t: t.metrics.get(name))


def gradient_norm(run: Run) -> str | None:
    """The global gradient norm before clipping, on a logarithmic axis if it spans more than a factor of 30."""
    steps, values = series(run.train, lambda t: t.grad_norm)
    known = values[np.isfinite(values)]
    log = bool(len(known)) and known.min() > 0 and known.max() > 30 * known.min()
    unit = "norm, logarithmic axis" if log else "norm"
    chart = Chart("Gradient norm over steps", unit, lambda v: f"{v:.3g}", log=log)
    return draw_lines(chart, [Line("", "experts", steps, values)])


def step_time(run: Run, typical: float | None) -> str | None:
    """Milliseconds of each step, and the run's step time (`typical`, the median of the steady steps)."""
    steps, values = series(run.train, lambda t: t.step_ms)
    speeds = series(run.train, lambda t: t.tokens_per_second)[1]
    lines = [Line("each step", "loss", steps, values)]
    if typical is not None:
        middle = Line(f"step time, {ms_text(typical)}", "ink", steps[[0, -1]], np.array([typical] * 2), style="dash")
        lines.append(middle)
    known = values[np.isfinite(values)]
    # One slow step, such as the first, would press all others down to the axis.
    top = 3 * typical if typical is not None and len(known) and known.max() > 3 * typical else None
    speed = {round(ms, 9): rate for ms, rate in zip(values, speeds, strict=True) if math.isfinite(rate)}

    def text(ms: float) -> str:
        rate = speed.get(round(ms, 9))
        return ms_text(ms) + (f", {count_text(rate)} tokens/s" if rate is not None else "")

    unit = "milliseconds" + (" (a triangle: beyond the axis)" if top is not None else "")
    return draw_lines(Chart("Time of each step", unit, text, top=top, marks=_marks(run)), lines)


def utilisation(run: Run) -> str | None:
    """MFU and HFU, where the accelerator's peak is known."""
    lines = []
    for name, role, value in (("MFU", "loss", "mfu"), ("HFU", "combine", "hfu")):
        steps, values = series(run.train, lambda t, value=value: getattr(t, value))  # type: ignore[misc]
        lines.append(Line(name, role, steps, 100 * values))
    return draw_lines(Chart("MFU and HFU over steps", "% of the peak", lambda v: percent_text(v / 100)), lines)


def parts(run: Run) -> str | None:
    """Milliseconds per call of dispatch, experts and combine: the median as a line, up to p99 as a band. With replicas,
    what the layer waited for them, which is a part of the others."""
    lines = []
    for part in PARTS[:-1]:
        steps, p50 = series(run.train, lambda t, part=part: t.part_ms(part, "p50"))  # type: ignore[misc]
        _, p99 = series(run.train, lambda t, part=part: t.part_ms(part, "p99"))  # type: ignore[misc]
        lines.append(Line(part, part, steps, p50, upper=np.where(np.isfinite(p99), p99, p50)))
    steps, fill = series(run.train, lambda t: t.part_ms("fill", "p50"))
    if np.isfinite(fill).any():
        lines.append(Line("waits for replicas", "rest", steps, fill))
    # A few slow calls, such as the first ones, would press all others down to the axis.
    typical = max(median(t.part_ms(part, "p99") for t in run.train) or 0.0 for part in PARTS[:-1])
    highest = max(t.part_ms(part, "p99") or 0.0 for part in PARTS[:-1] for t in run.train)
    top = 3 * typical if 0 < 3 * typical < highest else None
    unit = "milliseconds per call" + (" (the highest are cut off)" if top else "")
    return draw_lines(Chart("Times of the parts of a layer", unit, ms_text, top=top), lines)


def copies(run: Run) -> str | None:
    """Ranks per token: measured, against K, and against what uniform routing predicts."""
    steps, values = series(run.train, lambda t: t.copies_per_token)
    if not np.isfinite(values).any():
        return None
    ends, chosen = steps[[0, -1]], run.info.model.num_experts_per_tok
    lines = [Line("measured", "dispatch", steps, values)]
    if (uniform := run.info.predicted.copies_per_token_uniform) is not None:
        name = f"predicted (uniform): {uniform:.2f}"
        lines.append(Line(name, "predicted", ends, np.array([uniform] * 2), style="dash"))
    if chosen:
        lines.append(Line(f"K = {chosen}", "muted", ends, np.array([float(chosen)] * 2), style="thin"))
    return draw_lines(Chart("Ranks per token over steps", "ranks per token", plain_text, marks=_marks(run)), lines)


def remote_rows(run: Run) -> str | None:
    """Remote ranks per token, with a mark where experts moved and, from there on, what was predicted."""
    return _placed(run, lambda t: t.rows_remote_per_token, "rows", "dispatch", "remote ranks per token", 0.0)


def rank_load(run: Run) -> str | None:
    """The fullest rank's choices over the mean of all ranks, marked the same way; 1 is even."""
    if run.info.parallelism.get("world_size") == 1:
        return None
    if any(t.rank_load_after is not None for t in run.train):
        lines = [
            Line("without spare slots", "muted", *series(run.train, lambda t: t.rank_load_before)),
            Line("with spare slots", "experts", *series(run.train, lambda t: t.rank_load_after)),
        ]
        return draw_lines(Chart("Load of ranks", EVEN, plain_text, zero=False, low=1.0, marks=_marks(run)), lines)
    return _placed(run, lambda t: t.rank_load_max_over_mean, "load", "experts", EVEN, 1.0)


def rank_load_by_layer(run: Run) -> str | None:
    """The load of the fullest rank in each layer without and with spare slots, means over the last tenth of the
    recorded steps that are kept."""
    found = [sample.spare for sample in run.layer_samples if sample.spare]
    if not found:
        return None
    found = [spare for spare in found if len(spare) == len(found[-1])][-max(1, len(found) // 10) :]
    names, layer_L = layer_names(run, len(found[-1])), np.arange(len(found[-1]), dtype=float)
    lines = [
        Line(name, role, layer_L, np.array([[getattr(load, what) for load in spare] for spare in found]).mean(0), style)
        for name, role, what, style in (
            ("without spare slots", "muted", "before", "thin"), ("with spare slots", "experts", "after", "line"),
        )
    ]  # fmt: skip
    return draw_lines(_by_layer("Load of ranks by layer", EVEN, plain_text, names, zero=False, low=1.0), lines)


def _placed(
    run: Run, value: Callable[[Train], float | None], what: str, role: str, unit: str, low: float
) -> str | None:
    lines = [Line("measured", role, *series(run.train, value))]
    if not np.isfinite(lines[0].y).any():
        return None
    moves = [p for p in run.placements if p.event == "moved"]
    ends = [*(p.step for p in moves[1:]), run.train[-1].step] if moves else []
    at: list[float] = []
    foretold: list[float] = []
    for move, end in zip(moves, ends, strict=True):
        predicted = getattr(move.predicted, what)
        if predicted is not None:
            # NaN parts one move's line from the next.
            at += [float(move.step), float(end), float(end)]
            foretold += [predicted, predicted, math.nan]
    if at:
        lines.append(Line("predicted", "predicted", np.array(at), np.array(foretold), style="dash"))
    return draw_lines(Chart(unit, unit, plain_text, zero=low == 0.0, low=low, marks=_marks(run)), lines)


# Grids

EVEN = "× the mean of all ranks (1: even)"
"""What loads of ranks are told in."""

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
    steps = [str(digests[int(g[0])].step) for g in groups]
    texts = [[f"max/mean expert load {plain_text(v)}" for v in row] for row in worst_LX]
    about = "Max/mean expert load of each layer over time"
    grid = Grid(about, "layer", "step", layer_names(run, layers), steps, texts)
    bounds = np.geomspace(1, high, HEAT_LEVELS + 1)
    return _heat(grid, worst_LX, bounds, "heat", "1 (even)", f"{plain_text(high)} × the mean")


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
    texts = [
        [f"{told(a)}, {_percent(b)}" if np.isfinite(b) else None for a, b in zip(*pair, strict=True)]
        for pair in zip(value_WX, relative_WX, strict=True)
    ]
    steps = [str(step) for step, _ in kept]
    grid = Grid(f"{what} of each rank over time", "rank", "step", [str(rank) for rank in range(ranks)], steps, texts)
    bounds = np.linspace(-high, high, HEAT_LEVELS + 1)
    return _heat(grid, relative_WX, bounds, "diverge", _percent(-high), f"{_percent(high)} of the mean")


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
    about = f"Load of each {column} by {row}"
    grid = Grid(about, row, column, rows, columns, texts, cross_YX=dead_YX, suffix=" × the mean")
    return _heat(grid, relative_YX, bounds, "diverge", "0", f"{plain_text(high)} × the mean")


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
    texts = [
        [
            f"{count_text(rows_WW[i, j])} tokens" + (f", {_percent(deviation_WW[i, j], 1)}" if i != j else " stay")
            for j in range(ranks)
        ]
        for i in range(ranks)
    ]
    written = [[_percent(v) if np.isfinite(v) else "" for v in row] for row in deviation_WW]
    grid = Grid(
        "Traffic from rank to rank", "from rank", "to rank", names, names, texts, written if ranks <= NUMBERS else None
    )
    bounds = np.linspace(-high, high, HEAT_LEVELS + 1)
    picture = _heat(grid, deviation_WW, bounds, "diverge", _percent(-high), _percent(high), tallest=40)
    return picture + f'<p class="muted mean">Mean: {count_text(mean)} tokens per pair of ranks.</p>'


def _heat(
    grid: Grid, value_YX: np.ndarray, bounds: np.ndarray, ramp: str, low: str, high: str, tallest: float = 26.0
) -> str:
    """The grid, and the key of its colours from `low` to `high`. bounds: of the colours' intervals."""
    return draw_grid(grid, _levels(value_YX, bounds), ramp, tallest) + scale(ramp, low, high)


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


# Per layer, and memory

_TOP, _HEIGHT = 10.0, 150.0


def copies_by_layer(run: Run) -> str | None:
    """Ranks per token of each layer, the mean over the last tenth of the recorded steps."""
    found = [d.copies_L for d in run.layers if d.copies_L]
    found = [copies_L for copies_L in found if len(copies_L) == len(found[-1])]
    if not found:
        return None
    copies_L = np.array(found[-max(1, len(found) // 10) :], dtype=float).mean(axis=0)
    names, layer_L = layer_names(run, len(copies_L)), np.arange(len(copies_L), dtype=float)
    lines = [Line("measured", "dispatch", layer_L, copies_L, "column")]
    if (uniform := run.info.predicted.copies_per_token_uniform) is not None:
        ends = np.array([-0.5, len(copies_L) - 0.5])
        lines.append(Line(f"predicted (uniform): {uniform:.2f}", "predicted", ends, np.full(2, uniform), "dash"))
    text = partial(plain_text, digits=3)
    return draw_lines(_by_layer("Ranks per token by layer", "ranks per token", text, names), lines)


def _by_layer(title: str, unit: str, text: Callable[[float], str], names: list[str], **more: Any) -> Chart:
    """A chart across layers."""
    last = len(names) - 1
    return Chart(title, unit, text, across="layer", across_text=lambda at: names[min(max(round(at), 0), last)], **more)


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
    tensors = [size for name, size in pieces if name not in NOT_TENSORS]
    alone = " of tensors" if len(tensors) < len(pieces) else ""
    if alone:
        rows.append(("predicted of tensors", sum(tensors), "predicted sum"))
    if (peak := run.memory_peak) is not None:
        rows.append((f"measured peak{alone}", peak, "measured sum"))
    most = max((size for _, size, _ in rows), default=1.0)
    return [(*row, row[1] / max(most, 1.0)) for row in rows]
