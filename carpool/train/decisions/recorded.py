"""What a run chose is in its run.json, and is taken again by whoever goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from carpool.planner.decisions.chosen import Decisions
from carpool.train.launch.ranks import from_rank_0
from carpool.train.records.files import DECISIONS, read_record


def decisions_of(folders: Sequence[Path]) -> Decisions:
    """What a run chooses that goes on from these run directories, of which the first with a run.json counts."""
    return Decisions(lambda: read_record(folders, DECISIONS), from_rank_0)
