"""The page of a capacity plan: the best configurations, why, and pictures of the first one's step and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from carpool.report.charts import Chart, Line, draw_lines
from carpool.report.write import fill, write_page


@dataclass(frozen=True)
class PlanPage:
    """What the page shows. Times in seconds, sizes in bytes.

    Attributes:
        title: the model and the machine.
        verdict: what the first plan reaches, in a sentence.
        words: sentences that say what the first plan is.
        facts: (what, value, detail).
        columns, rows: of the table of plans.
        steps: (plan, (least, likely, most) seconds of its step).
        share: (kind, share of the step) of the first plan.
        memory: (component, bytes) of the first plan; capacity: what may be used.
        timeline: (moment, bytes) of the first plan.
        why: (question, answer).
        inputs: (what, where it is from).
        toml: the first plan's file.
        command: what wrote it.
    """

    title: str
    verdict: str
    words: Sequence[str]
    facts: Sequence[tuple[str, str, str]]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    steps: Sequence[tuple[str, tuple[float, float, float]]]
    share: Sequence[tuple[str, float]]
    memory: Sequence[tuple[str, float]]
    capacity: float
    timeline: Sequence[tuple[str, float]]
    why: Sequence[tuple[str, str]]
    inputs: Mapping[str, str]
    toml: str
    command: str


_COMPONENTS = {
    "optimizer": "state of the optimizer",
    "activations": "activations, and what a layer works with",
    "transport": "buffers of rides",
    "context": "CUDA's context and kernels",
    "nccl": "NCCL",
    "fragments": "what the allocator cannot use",
    "graphs": "an evaluation beside the graphs",
}


def write_plan(page: PlanPage, output: Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        ValueError: it cannot be written there.
        ImportError: jinja2 is missing."""
    return write_page(output, "page", lambda: _render(page))


def _render(page: PlanPage) -> str:
    most = max(value for _, value in page.memory)
    longest = max(high for _, (_, _, high) in page.steps)
    return fill(
        "plan.html.j2",
        page=page,
        steps=[(name, *(100 * one / longest for one in of), f"{of[1]:.3g} s") for name, of in page.steps],
        share=[(kind, 100 * value) for kind, value in page.share],
        memory=[
            (_COMPONENTS.get(name, name), f"{value / 2**30:.1f} GiB", 100 * value / most) for name, value in page.memory
        ],
        timeline=_timeline(page),
    )


def _timeline(page: PlanPage) -> str | None:
    size_N = np.array([size / 2**30 for _, size in page.timeline])
    step_N = np.arange(1, len(size_N) + 1, dtype=float)
    chart = Chart(
        alt="Memory of a rank through forward, loss and backward",
        unit="GiB of tensors",
        text=lambda value: f"{value:.1f} GiB",
        across="moments of a micro-batch: forward, loss, backward",
    )
    lines = [
        Line("predicted", "predicted", step_N, size_N, "dash"),
        Line("limit: what may be used", "limit", step_N, np.full_like(size_N, page.capacity / 2**30)),
    ]
    return draw_lines(chart, lines)
