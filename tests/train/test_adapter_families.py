"""What was trained is what peft, a merge and servers get, for each family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.train.adapter_families import BOUND, FAMILIES, MOVED, follow


@pytest.mark.parametrize(
    "family", [*FAMILIES[:3], *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[3:])]
)
def test_adapters_are_what_was_trained(ranks: Ranks, family: str, tmp_path: Path) -> None:
    outcome = follow(ranks, family, tmp_path)
    assert outcome.moved > MOVED, outcome
    assert max(outcome.peft, outcome.merged) < BOUND, outcome
