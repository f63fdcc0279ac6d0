"""Where the host must not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
