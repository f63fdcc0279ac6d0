"""Figures over steps: loss, copies per token, gradient norm, speed, and milliseconds of the layer's parts.

Long runs are thinned to what the width can show: the mean of neighbouring steps. A dashed line is a prediction, a thin
dotted vertical line is a place where the run resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from carpool.report.read import Run
from carpool.report.schema import PARTS, Train
from carpool.report.svg import drawing, role

POINTS = 400
"""More than this many steps are thinned: about one point per pixel of the axes."""


def series(train: Sequence[Train], value: Callable[[Train], float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values as floats, NaN where nothing finite was measured, thinned to at most POINTS means."""
    steps = np.array([t.step for t in train], dtype=float)
    values = np.array([math.nan if (v := value(t)) is None else v for t in train], dtype=float)
    values[~np.isfinite(values)] = math.nan
    if len(steps) <= POINTS:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), POINTS)
    return np.array([steps[g].mean() for g in groups]), np.array([_mean(values[g]) for g in groups])


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str = "", width: float = 1.6) -> None:
    # A lone point between gaps would be invisible as a line.
    marker = "o" if np.isfinite(values).sum() < 20 else ""
    axes.plot(steps, values, color=role(colour), label=label or None, linewidth=width, marker=marker, markersize=3)


def _finish(axes: Axes, run: Run, ylabel: str, legend: bool = True) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(True, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for entry in run.info.history:
        if entry.from_step and entry.from_step <= run.train[-1].step:
            axes.axvline(entry.from_step, color=role("mark"), linewidth=0.9, linestyle=":")
    if legend:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, handlelength=1.8, columnspacing=1.2)


def _is_known(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def loss(run: Run) -> Figure | None:
    """Training loss of each step, and held-out loss where it was measured."""
    steps, values = series(run.train, lambda t: t.loss)
    evals = [(e.step, e.loss) for e in run.evals if e.loss is not None]
    if not _is_known(values) and not evals:
        return None
    with drawing(2.7) as (figure, axes):
        _line(axes, steps, values, "loss", "training", width=1.2)
        if evals:
            held_steps, held = zip(*evals, strict=True)
            axes.plot(held_steps, held, color=role("heldout"), label="held out", marker="o", markersize=4)
        _finish(axes, run, "loss (nats per token)")
    return figure


def copies(run: Run) -> Figure | None:
    """Copies per token: measured, against K, and against what uniform routing predicts."""
    steps, values = series(run.train, lambda t: t.copies_per_token)
    if not _is_known(values):
        return None
    chosen = run.info.model.num_experts_per_tok
    uniform = run.info.predicted.copies_per_token_uniform
    with drawing(2.5) as (figure, axes):
        _line(axes, steps, values, "dispatch", "measured")
        if uniform is not None:
            label = f"predicted (uniform): {uniform:.2f}"
            axes.axhline(uniform, color=role("predicted"), linestyle=(0, (4, 3)), label=label)
        if chosen:
            axes.axhline(chosen, color=role("muted"), linewidth=1.2, label=f"K = {chosen}")
        top = max(np.nanmax(values), chosen or 0, uniform or 0)
        axes.set_ylim(0, top * 1.08)
        _finish(axes, run, "copies per token", legend=False)
        # The three labels do not fit side by side.
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, handlelength=2.2, columnspacing=1.2)
    return figure


def remote_rows(run: Run) -> Figure | None:
    """Remote rows per token, with a mark where experts moved and, from there on, what was predicted."""
    return _placed(run, lambda t: t.rows_remote_per_token, "rows", "dispatch", "remote rows per token")


def rank_load(run: Run) -> Figure | None:
    """The fullest rank's choices over the mean of all ranks, marked the same way."""
    return _placed(run, lambda t: t.rank_load_max_over_mean, "load", "experts", "load of ranks, max/mean")


def _placed(run: Run, value: Callable[[Train], float | None], what: str, colour: str, ylabel: str) -> Figure | None:
    steps, values = series(run.train, value)
    if not run.placements or not _is_known(values):
        return None
    moves = [p for p in run.placements if p.event == "moved"]
    ends = [p.step for p in moves[1:]] + [run.train[-1].step]
    with drawing(2.5) as (figure, axes):
        _line(axes, steps, values, colour, "measured", width=1.2)
        for number, (move, end) in enumerate(zip(moves, ends, strict=True)):
            named = number == 0
            axes.axvline(move.step, color=role("mark"), linewidth=1.0, label="experts moved" if named else None)
            if (foretold := getattr(move.predicted, what)) is not None:
                label = "predicted" if named else None
                axes.plot([move.step, end], [foretold] * 2, color=role("predicted"), linestyle=(0, (4, 3)), label=label)
        _finish(axes, run, ylabel)
    return figure


def gradient_norm(run: Run) -> Figure | None:
    """The global gradient norm before clipping, on a logarithmic axis if it spans more than a factor of 30."""
    steps, values = series(run.train, lambda t: t.grad_norm)
    if not _is_known(values):
        return None
    with drawing(2.2) as (figure, axes):
        _line(axes, steps, values, "experts", width=1.2)
        known = values[np.isfinite(values)]
        if known.min() > 0 and known.max() > 30 * known.min():
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.08 * max(known.max(), 1e-12))
        _finish(axes, run, "gradient norm", legend=False)
    return figure


def speed(run: Run) -> Figure | None:
    """Tokens per second of all ranks together."""
    steps, values = series(run.train, lambda t: t.tokens_per_second)
    if not _is_known(values):
        return None
    with drawing(2.2) as (figure, axes):
        _line(axes, steps, values, "loss", width=1.2)
        axes.set_ylim(0, 1.08 * np.nanmax(values))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        _finish(axes, run, "tokens/s", legend=False)
    return figure


def utilisation(run: Run) -> Figure | None:
    """MFU and HFU, where the accelerator's peak is known."""
    steps, mfu = series(run.train, lambda t: t.mfu)
    _, hfu = series(run.train, lambda t: t.hfu)
    if not _is_known(mfu) and not _is_known(hfu):
        return None
    with drawing(2.2) as (figure, axes):
        for values, colour, label in ((mfu, "loss", "MFU"), (hfu, "combine", "HFU")):
            if _is_known(values):
                _line(axes, steps, 100 * values, colour, label, width=1.2)
        axes.set_ylim(bottom=0)
        _finish(axes, run, "% of peak")
    return figure


def parts(run: Run) -> Figure | None:
    """Milliseconds per call of dispatch, experts and combine: the median as a line, up to p99 as a band."""
    with drawing(2.7) as (figure, axes):
        drawn = False
        for part in PARTS[:-1]:
            steps, p50 = series(run.train, lambda t, part=part: t.part_ms(part, "p50"))  # type: ignore[misc]
            _, p99 = series(run.train, lambda t, part=part: t.part_ms(part, "p99"))  # type: ignore[misc]
            if not _is_known(p50):
                continue
            drawn = True
            _line(axes, steps, p50 / 1000, part, part, width=1.4)
            axes.fill_between(steps, p50 / 1000, p99 / 1000, color=role(part), alpha=0.22, linewidth=0)
        if not drawn:
            return None
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
        _finish(axes, run, "per call")
    return figure
