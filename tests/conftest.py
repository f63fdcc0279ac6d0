"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

# Two cores: four ranks and the test process each take one thread, or they fight.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four gloo ranks, started at first use and shared by the whole session (see tests/ranks.py).

    They have imported the tests' modules when they start, and what such a module names as RANKS_IMPORT.
    """
    modules = {item.module for item in request.session.items if "ranks" in getattr(item, "fixturenames", ())}
    pool = Ranks({name for module in modules for name in (module.__name__, *getattr(module, "RANKS_IMPORT", ()))})
    yield pool
    pool.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no worker ends alone. Tests marked `gpu` are skipped where there is none."""
    items.sort(key=lambda item: (item.path.name != "test_interpreted.py", item.path.parent.name != "train"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
