"""Where the host must not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def no_waits(on: bool = True) -> Iterator[None]:
    """PyTorch raises if the host waits for the GPU inside."""
    if on:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on:
            torch.cuda.set_sync_debug_mode("default")


class Reads(TorchFunctionMode):
    """Counts inside what the host reads of tensors, for which it waits where they are on a GPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in {"tolist", "item", "__bool__", "__int__", "__index__", "nonzero"}
        return func(*args, **(kwargs or {}))
