"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks
from tests.test_interpreted import Interpreted, why_not

_INTERPRETED = pytest.StashKey[Interpreted | None]()

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


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Interpreted | None:
    """The kernels' tests in Triton's interpreter, under way since the session began; None where that cannot be."""
    return request.config.stash[_INTERPRETED]


def pytest_collection_finish(session: pytest.Session) -> None:
    # What PyTorch and transformers made when they were imported stays; a collection need not look through it each time.
    gc.collect()
    gc.freeze()
    wanted = any("interpreted" in getattr(item, "fixturenames", ()) for item in session.items)
    start = wanted and not session.config.option.collectonly and why_not() is None
    session.config.stash[_INTERPRETED] = Interpreted() if start else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (running := session.config.stash.get(_INTERPRETED, None)) is not None:
        running.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for the interpreter come last. Tests marked `gpu` are skipped where there is none."""
    items.sort(key=lambda item: item.path.name == "test_interpreted.py")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
