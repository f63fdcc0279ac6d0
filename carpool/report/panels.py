"""The figures of the page in their order, each with the words around it.

A panel without data keeps its place and says what is missing: an absent figure must not pass for a good one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from carpool.report import curves, grids, memory
from carpool.report.grids import Scale
from carpool.report.read import Run
from carpool.report.svg import to_svg

Drawn = Figure | tuple[Figure, Scale] | None


@dataclass(frozen=True)
class Panel:
    """One card of the page; `svg` is None if there is nothing to draw, and then `missing` says why."""

    name: str
    title: str
    caption: str
    missing: str
    svg: str | None
    scale: Scale | None


def panels(run: Run) -> list[Panel]:
    """Draws every figure of the page. Figures of accelerators, and of placement, are left out
    where there is none."""
    step = f" (step {run.last_layers.step})" if run.last_layers is not None else ""
    made = [
        _panel(run, curves.loss, "loss", "Loss", "Training loss of each step and loss on held-out text.", "no loss"),
        _panel(
            run,
            curves.copies,
            "copies",
            "Copies per token",
            "How many ranks a token visits, mean over layers. One row per expert would make K. "
            "Dashed: predicted for uniform random routing.",
            "no copies per token",
        ),
        _panel(
            run,
            grids.load_over_time,
            "load-time",
            "Load per layer over time",
            "The busiest expert's tokens over the mean of its layer; a column shows the worst of the steps it covers.",
            "no loads per layer",
        ),
        _panel(
            run,
            grids.load_by_expert,
            "load-expert",
            f"Load per expert{step}",
            "Tokens of each expert over the mean of its layer. × marks an expert that no token chose.",
            "no loads per expert",
        ),
        _panel(
            run,
            grids.traffic,
            "traffic",
            f"Traffic from rank to rank{step}",
            "Rows sent in the forward dispatch, all layers together. The grey diagonal stays on its rank.",
            "no traffic between ranks (or there is only one rank)",
        ),
        _panel(
            run,
            curves.remote_rows,
            "remote-rows",
            "Remote rows per token",
            "Rows that a token sends to other ranks, mean over layers. Vertical lines: experts moved. Dashed: "
            "predicted for the new layout, from other tokens.",
            "no placement",
        ),
        _panel(
            run,
            curves.rank_load,
            "rank-load",
            "Load of ranks",
            "Choices that the fullest rank computes over the mean of all ranks, mean over layers.",
            "no placement",
        ),
        _panel(
            run,
            curves.parts,
            "parts",
            "Dispatch, experts, combine",
            "Time per call on the slowest rank: the line is the median, the band reaches up to p99.",
            "no times of dispatch, experts and combine",
        ),
        _panel(
            run,
            memory.memory,
            "memory",
            "Memory per rank",
            "Hatched: predicted from shapes before the run. Solid: the measured peak of the fullest rank.",
            "neither a predicted nor a measured memory",
        ),
        _panel(run, curves.speed, "speed", "Speed", "Tokens per second of all ranks together.", "no tokens per second"),
        _panel(
            run,
            curves.gradient_norm,
            "gradient-norm",
            "Gradient norm",
            "Global norm over all parameters of all ranks, before clipping.",
            "no gradient norm",
        ),
        _panel(
            run,
            curves.utilisation,
            "utilisation",
            "MFU and HFU",
            "Share of the accelerators' peak. MFU counts the model's own arithmetic (active parameters, causal "
            "attention at half), HFU also what was computed again.",
            "no MFU",
        ),
    ]
    optional = {"utilisation", *(() if run.placements else ("remote-rows", "rank-load"))}
    return [panel for panel in made if panel.svg is not None or panel.name not in optional]


def _panel(run: Run, draw: Callable[[Run], Drawn], name: str, title: str, caption: str, missing: str) -> Panel:
    drawn = draw(run)
    figure, scale = drawn if isinstance(drawn, tuple) else (drawn, None)
    svg = to_svg(figure, name, f"{title}. {caption}") if figure is not None else None
    return Panel(name, title, caption, f"The run recorded {missing}.", svg, scale)
