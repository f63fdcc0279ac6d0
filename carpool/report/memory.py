"""The figure of memory: what was predicted per rank, component by component, above what was measured.

Predicted pieces are hatched and outlined with a dashed line; the measured peak is one solid bar.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from carpool.report.read import Run
from carpool.report.svg import drawing, role
from carpool.report.units import bytes_text

COLOURS = ("loss", "heldout", "experts", "combine", "dispatch", "rest")
HATCHES = ("////", "\\\\\\\\", "....", "xxxx", "----", "||||")


def memory(run: Run) -> Figure | None:
    """Two bars in bytes per rank: predicted (stacked, hatched) and the measured peak (solid)."""
    pieces = predicted_pieces(run)
    peak = measured_peak(run)
    if not pieces and peak is None:
        return None
    with drawing(1.7 + 0.22 * ((len(pieces) + 1) // 2)) as (figure, axes):
        left = 0.0
        for i, (name, size) in enumerate(pieces):
            axes.barh(
                1,
                size,
                left=left,
                height=0.55,
                facecolor="none",
                edgecolor=role(COLOURS[i % len(COLOURS)]),
                hatch=HATCHES[i % len(HATCHES)],
                linestyle="--",
                linewidth=1.0,
                label=f"{name}: {bytes_text(size)}",
            )
            left += size
        if pieces:
            _beside(axes, left, 1)
        if peak is not None:
            axes.barh(0, peak, height=0.55, facecolor=role("ink"), linewidth=0)
            _beside(axes, peak, 0)
        axes.set_xlim(0, 1.25 * max(left, peak or 0.0, 1.0))
        axes.set_ylim(-0.5, 1.5)
        axes.set_yticks([1, 0], ["predicted", "measured"])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        if pieces:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.27, 1.0), ncols=2, columnspacing=1.2, handleheight=1.1)
    return figure


def _beside(axes: Axes, size: float, row: int) -> None:
    axes.annotate(bytes_text(size), (size, row), xytext=(4, 0), textcoords="offset points", va="center", size=8.5)


def predicted_pieces(run: Run) -> list[tuple[str, float]]:
    """The predicted components of one rank's memory, in bytes, without the total and without empty ones."""
    sizes = run.info.predicted.memory_per_rank_bytes
    pieces = [(name, size) for name, size in sizes.items() if name != "total" and size]
    total = sizes.get("total")
    return pieces or ([("total", total)] if total else [])


def measured_peak(run: Run) -> float | None:
    """The largest peak that any rank reported in any step, in bytes."""
    return max((t.memory_peak_bytes for t in run.train if t.memory_peak_bytes is not None), default=None)
