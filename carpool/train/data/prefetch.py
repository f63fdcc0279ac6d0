"""The next step's batches are made while this one computes.

    loader = Prefetch(TrainLoader(...), device)      the same batches in the same order

A thread makes them, one step ahead, in pinned memory, from which they go to a GPU without the host waiting. The state
is of what was handed out: what is ready but was not asked for is made again after a resume.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from carpool.train.data.loader import Batch, TrainLoader

# The batches of a step, the loader's state once they are handed out, and the step's targets and tokens.
Ready = tuple[list[Batch], dict[str, Any], int, int]


class Prefetch:
    """Endless iterator over the steps of a loader, which nobody else uses from now on.

    Args:
        loader: makes the batches.
        device: where they will go; for a GPU they are in pinned memory.

    Attributes:
        targets, tokens: as `TrainLoader`'s, of the step handed out last.
    """

    def __init__(self, loader: TrainLoader, device: torch.device) -> None:
        self._loader, self._pin, self._state = loader, device.type == "cuda", loader.state_dict()
        # A thread begins on device 0, where other ranks are.
        begin = partial(torch.cuda.set_device, device) if self._pin else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool-data", initializer=begin)
        self._next: Future[Ready] | None = None
        self.targets = self.tokens = 0

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> list[Batch]:
        if self._next is None:
            self._next = self._thread.submit(self._make)
        batches, self._state, self.targets, self.tokens = self._next.result()
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
        return batches, self._loader.state_dict(), self._loader.targets, self._loader.tokens
