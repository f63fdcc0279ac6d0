"""Two runs that are bitwise equal, on GPUs too.

Carpool's own kernels add in a fixed order, always. PyTorch's do not all: the backward of fused attention adds what
blocks of keys contribute to a query in the order in which they finish, and two equal runs differ from the second step
on. PyTorch has deterministic algorithms for that, which are slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def determinism(on: bool) -> Iterator[None]:
    """Inside, PyTorch uses deterministic algorithms, and raises RuntimeError where it has none."""
    if not on:
        yield
        return
    # A module whose attributes are made on first use.
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would find code that reads what nobody wrote, at the cost of writing every buffer.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
