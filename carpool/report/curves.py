"""The run's charts over steps: loss, rates and norms, times, copies per token, load of ranks.

Long runs are thinned to what the width can show: the mean of neighbouring steps. A dashed line is a prediction, a thin
dotted vertical line is a place where the run resumed, a solid one where experts moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from carpool.report.lines import Chart, Line, draw
from carpool.report.read import Run
from carpool.report.schema import PARTS, Train
from carpool.report.steps import median
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


def _simple(run: Run, chart: Chart, key: str, role: str) -> str | None:
    """One line of what each step recorded."""
    return draw(chart, [Line("", role, *series(run.train, lambda t: getattr(t, key)))])


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
    return draw(Chart(about, "nats per token", lambda v: plain_text(v, 4), zero=False, marks=_marks(run)), lines)


def held_out(run: Run, name: str, role: str) -> list[Line]:
    """Held-out losses as points, if there are any."""
    held = [(e.step, e.loss) for e in run.evals if e.loss is not None and math.isfinite(e.loss)]
    if not held:
        return []
    steps, losses = np.array(held, dtype=float).T
    return [Line(name, role, steps, losses, style="point")]


def learning_rate(run: Run) -> str | None:
    """The learning rate of each step."""
    return _simple(run, Chart("learning rate", "learning rate", lambda v: f"{v:.3g}"), "learning_rate", "experts")


def balance_loss(run: Run) -> str | None:
    """The auxiliary loss, before it is weighed."""
    chart = Chart("Balance loss over steps", "balance loss, unweighed", lambda v: plain_text(v, 4), zero=False)
    return _simple(run, chart, "aux_loss", "combine")


def gradient_norm(run: Run) -> str | None:
    """The global gradient norm before clipping, on a logarithmic axis if it spans more than a factor of 30."""
    steps, values = series(run.train, lambda t: t.grad_norm)
    known = values[np.isfinite(values)]
    log = bool(len(known)) and known.min() > 0 and known.max() > 30 * known.min()
    unit = "norm, logarithmic axis" if log else "norm"
    chart = Chart("Gradient norm over steps", unit, lambda v: f"{v:.3g}", log=log)
    return draw(chart, [Line("", "experts", steps, values)])


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
    return draw(Chart("Time of each step", unit, text, top=top, marks=_marks(run)), lines)


def utilisation(run: Run) -> str | None:
    """MFU and HFU, where the accelerator's peak is known."""
    lines = []
    for name, role, value in (("MFU", "loss", "mfu"), ("HFU", "combine", "hfu")):
        steps, values = series(run.train, lambda t, value=value: getattr(t, value))  # type: ignore[misc]
        lines.append(Line(name, role, steps, 100 * values))
    return draw(Chart("MFU and HFU over steps", "% of the peak", lambda v: percent_text(v / 100)), lines)


def parts(run: Run) -> str | None:
    """Milliseconds per call of dispatch, experts and combine: the median as a line, up to p99 as a band."""
    lines = []
    for part in PARTS[:-1]:
        steps, p50 = series(run.train, lambda t, part=part: t.part_ms(part, "p50"))  # type: ignore[misc]
        _, p99 = series(run.train, lambda t, part=part: t.part_ms(part, "p99"))  # type: ignore[misc]
        lines.append(Line(part, part, steps, p50, upper=np.where(np.isfinite(p99), p99, p50)))
    # A few slow calls, such as the first ones, would press all others down to the axis.
    typical = max(median(t.part_ms(part, "p99") for t in run.train) or 0.0 for part in PARTS[:-1])
    highest = max(t.part_ms(part, "p99") or 0.0 for part in PARTS[:-1] for t in run.train)
    top = 3 * typical if 0 < 3 * typical < highest else None
    unit = "milliseconds per call" + (" (the highest are cut off)" if top else "")
    return draw(Chart("Times of the parts of a layer", unit, ms_text, top=top), lines)


def copies(run: Run) -> str | None:
    """Copies per token: measured, against K, and against what uniform routing predicts."""
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
    return draw(Chart("Copies per token over steps", "copies per token", plain_text, marks=_marks(run)), lines)


def remote_rows(run: Run) -> str | None:
    """Remote rows per token, with a mark where experts moved and, from there on, what was predicted."""
    return _placed(run, lambda t: t.rows_remote_per_token, "rows", "dispatch", "remote rows per token", 0.0)


def rank_load(run: Run) -> str | None:
    """The fullest rank's choices over the mean of all ranks, marked the same way; 1 is even."""
    if run.info.parallelism.get("world_size") == 1:
        return None
    return _placed(
        run, lambda t: t.rank_load_max_over_mean, "load", "experts", "× the mean of all ranks (1: even)", 1.0
    )


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
    return draw(Chart(unit, unit, plain_text, zero=low == 0.0, low=low, marks=_marks(run)), lines)
