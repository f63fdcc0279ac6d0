"""Each file of this folder as a fixture: imported, as a script would, and forgotten after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.plugins.outside import imported


def _fixture_of(name: str) -> Any:
    @pytest.fixture
    def module() -> Iterator[Any]:
        with imported(name) as found:
            yield found

    return module


counting, deeper, gain, heavy_ball, in_turn, loud, ring = map(
    _fixture_of, ("counting", "deeper", "gain", "heavy_ball", "in_turn", "loud", "ring")
)
