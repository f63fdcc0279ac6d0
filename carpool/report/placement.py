"""The table of where experts went: each look at the routing, what was moved and why, foretold and measured."""

from __future__ import annotations

from collections.abc import Callable

from carpool.report.read import Run
from carpool.report.schema import Outlook, Placement
from carpool.report.units import bytes_text, count_text, ms_text, plain_text

PLACEMENT_COLUMNS = (
    "Step",
    "What, and why",
    "Layers",
    "Experts",
    "Bytes moved",
    "Moved in",
    "Solved in",
    "Remote rows per token: before → predicted, measured",
    "Remote bytes per token: before → predicted, measured",
    "Load of the fullest rank: before → predicted, measured",
)


def placement_rows(run: Run) -> list[list[str]]:
    """One row of texts for each look; empty if the run had none."""
    measured = {p.since: p.measured for p in run.placements if p.event == "measured"}
    return [_row(p, measured.get(p.step, Outlook())) for p in run.placements if p.event in ("moved", "kept")]


def _row(look: Placement, measured: Outlook) -> list[str]:
    moved = look.event == "moved"

    def change(before: float | None, after: float | None, then: float | None, text: Callable[..., str]) -> str:
        foretold = f"{text(before)} → {text(after)}" if moved else text(before)
        return f"{foretold}, {text(then)}" if moved else foretold

    def seconds(value: float | None) -> str:
        return ms_text(None if value is None else 1000 * value)

    return [
        str(look.step),
        f"{look.event}: {look.why}" if look.why else look.event,
        count_text(look.layers),
        count_text(look.experts),
        bytes_text(look.bytes),
        seconds(look.seconds),
        seconds(look.solve_seconds),
        change(look.before.rows, look.predicted.rows, measured.rows, plain_text),
        change(look.before.bytes, look.predicted.bytes, measured.bytes, bytes_text),
        change(look.before.load, look.predicted.load, measured.load, plain_text),
    ]
