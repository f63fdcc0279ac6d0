from __future__ import annotations

import pytest

from carpool.transport import TRANSPORTS
from tests.plugins.node_rows import NodeRows, Streamed


@pytest.fixture
def outside_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transports from outside of the package, registered for one test."""
    for way in (NodeRows, Streamed):
        monkeypatch.setitem(TRANSPORTS._things, way.name, way)
