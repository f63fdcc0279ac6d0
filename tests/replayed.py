"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from carpool.kernels.capture import Recorder


class Again(Recorder):
    """In the place of `carpool.kernels.capture.Recorder` where nothing can be captured: work is done when it is
    recorded, with whatever its tensors hold, and again in a replay.

    Args:
        around: is on in each replay, because a graph has what was on when it was recorded."""

    def __init__(self, around: AbstractContextManager[Any] | None = None) -> None:
        self.around = around

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        # A capture draws no random numbers; each replay does.
        state = torch.get_rng_state()
        work()
        torch.set_rng_state(state)

        def again() -> None:
            with torch.enable_grad(), self.around or nullcontext():
                work()

        return again
