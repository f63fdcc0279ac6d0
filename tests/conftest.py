"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.environment import ROOT, allow_writes, prepare_environment, refuse_writes
from tests.interpreter import choose_interpreter
from tests.ranks import WORLD_SIZE, Ranks, fork_server

# Folders in the order of how long a file of theirs takes.
FIRST = ["recipes", "train", "hf", "schedule", "tests", "interpreted"]

POOLS = ("ranks", "two_ranks", "one_rank")
FOLDER = pytest.StashKey[str]()
STARTED = pytest.StashKey[dict[str, Ranks]]()

gc.disable()  # until all is imported
choose_interpreter()  # before any test imports Triton

# Two cores: four ranks and the test process each take one thread, or they fight.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # how pytest itself writes is decided before, by the user's own environment
def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOLDER] = tempfile.mkdtemp(prefix="carpool-tests-")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        prepare_environment(os.environ, Path(config.stash[FOLDER]) / "caches")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of a test, such as the default `runs/demo`, are below its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four gloo ranks, started at first use and shared by the whole session (see tests/ranks.py).

    They have imported the tests' modules when they start, and what such a module names as RANKS_IMPORT.
    """
    yield from _pool(request, "ranks", WORLD_SIZE)


@pytest.fixture(scope="session")
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two such ranks, in a group of their own."""
    yield from _pool(request, "two_ranks", 2)


@pytest.fixture(scope="session")
def one_rank(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """One such rank."""
    yield from _pool(request, "one_rank", 1)


def _pool(request: pytest.FixtureRequest, name: str, world_size: int) -> Iterator[Ranks]:
    pool = Ranks(_imported(request.session), world_size)
    request.session.stash.setdefault(STARTED, {})[name] = pool
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of runs on a folder of short files, whose tokens are kept."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    return [f"data.train={folder}", f"data.cache_dir={folder}/cache", "data.eval_fraction=0.02"]


def _imported(session: pytest.Session) -> set[str]:
    modules = {item.module for item in session.items if set(POOLS) & set(getattr(item, "fixturenames", ()))}
    return {name for module in modules for name in (module.__name__, *getattr(module, "RANKS_IMPORT", ()))}


def pytest_collection_finish(session: pytest.Session) -> None:
    if "carpool.train.plan.estimate" in sys.modules:
        from tests.hf.measured import measure_once

        measure_once()
    # What PyTorch and transformers made when they were imported stays; a collection need not look through it each time.
    gc.collect()
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly:
        os.chdir(session.config.stash[FOLDER])  # what serves several tests, such as ranks, is there
        refuse_writes(ROOT)
    # xdist's own process collects nothing, and no test runs in it.
    if (imported := _imported(session)) and not session.config.option.collectonly and not torch.cuda.is_available():
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what ranks write belongs to tests
        fork_server(imported)
        capture.suspend_global_capture()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pools that the test does not use rest."""
    for name, pool in item.session.stash.get(STARTED, {}).items():
        if name not in getattr(item, "fixturenames", ()):
            pool.pause()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or libraries report as leaked what is left when the process ends
    os.chdir(session.config.invocation_params.dir)
    allow_writes()  # pytest's own cache and reports


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no core waits at the end. `gpu` needs a GPU."""
    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
