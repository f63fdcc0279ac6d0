"""The next step's batches are made while this one computes.

    loader = Prefetch(TrainLoader(...), pin=True)       the same batches in the same order

A thread makes them, one step ahead, in pinned memory, from which they go to a GPU without the host waiting. The state
is of what was handed out: what is ready but was not asked for is made again after a resume.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from carpool.train.data.loader import Batch, TrainLoader

# The batches of a step, and the loader's state once they are handed out.
Ready = tuple[list[Batch], dict[str, Any]]


class Prefetch:
    """Endless iterator over the steps of a loader, which nobody else uses from now on.

    Args:
        loader: makes the batches.
        pin: in pinned memory; needs a GPU.
    """

    def __init__(self, loader: TrainLoader, pin: bool) -> None:
        self._loader, self._pin, self._state = loader, pin, loader.state_dict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool-data")
        self._next: Future[Ready] | None = None
        self.targets = loader.targets

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> list[Batch]:
        if self._next is None:
            self._next = self._thread.submit(self._make)
        batches, self._state = self._next.result()
        self._next = self._thread.submit(self._make)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """As `TrainLoader.state_dict`, of what was handed out."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `TrainLoader.load_state_dict`."""
        self.drop()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def drop(self) -> None:
        """Give up what was made ahead; it is made again."""
        if self._next is not None:
            self._next.result()
            self._next = None
            self._loader.load_state_dict(self._state)

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self) -> Ready:
        batches = next(self._loader)
        if self._pin:
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        return batches, self._loader.state_dict()
