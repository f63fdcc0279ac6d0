"""The table of where experts went: each look at the routing, what was moved and why, foretold and measured."""

from __future__ import annotations

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
    looks = [p for p in run.placements if p.event in ("moved", "kept")]
    return [_row(look, measured.get(look.step, Outlook())) for look in looks]


def _row(look: Placement, measured: Outlook) -> list[str]:
    foretold = []
    for key, text in (("rows", plain_text), ("bytes", bytes_text), ("load", plain_text)):
        before, after, then = (text(getattr(outlook, key)) for outlook in (look.before, look.predicted, measured))
        foretold.append(f"{before} → {after}, {then}" if look.event == "moved" else before)
    return [
        str(look.step),
        f"{look.event}: {look.why}" if look.why else look.event,
        count_text(look.layers),
        count_text(look.experts),
        bytes_text(look.bytes),
        *(ms_text(None if s is None else 1000 * s) for s in (look.seconds, look.solve_seconds)),
        *foretold,
    ]
