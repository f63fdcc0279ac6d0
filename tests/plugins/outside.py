"""Files of this folder as a script has them: outside the package, and registered by being imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carpool.experts import EXPERTS
from carpool.families import FAMILIES
from carpool.hf.architecture_changes import ARCHITECTURE_CHANGES
from carpool.metrics.metric import METRICS
from carpool.optim import OPTIMIZERS
from carpool.ride.schedule import SCHEDULES
from carpool.train.extensions import EXTENSIONS
from carpool.transport import TRANSPORTS
from tests.train.test_loop import TWO, run

HERE = Path(__file__).parent
REGISTRIES: tuple[Any, ...] = (
    ARCHITECTURE_CHANGES, EXPERTS, EXTENSIONS, FAMILIES, METRICS, OPTIMIZERS, SCHEDULES, TRANSPORTS,
)  # fmt: skip


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """The module, whose things are registered meanwhile."""
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    try:
        yield importlib.import_module(name)
    finally:
        forget(name)


def forget(name: str) -> None:
    for registry in REGISTRIES:
        for key, thing in list(registry._things.items()):
            if name in (getattr(thing, "__module__", ""), getattr(thing, "module", "")):
                del registry._things[key]
    sys.modules.pop(name, None)


def train_with(name: str, output: str, overrides: list[str]) -> str:
    """On a rank: a run with it; the error."""
    with imported(name):
        return run(output, [*TWO, *overrides])
