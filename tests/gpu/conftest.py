"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """PyTorch fills memory that nobody initialised with NaN, so that what must not be read is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
