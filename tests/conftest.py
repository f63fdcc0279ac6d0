"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

# Two cores: four ranks and the test process each take one thread, or they fight.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo ranks, started at first use and shared by the whole session (see tests/ranks.py)."""
    pool = Ranks()
    yield pool
    pool.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
