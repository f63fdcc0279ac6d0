"""Numbers that go between the device and the host without either waiting for the other."""

from __future__ import annotations

from typing import Any

import torch


class ToHost:
    """A tensor on its way to the host, behind all that the current stream was given before."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._there is None or self._there.query()

    def read(self) -> torch.Tensor:
        """The tensor on the host. Waits until it is there."""
        if self._there is not None:
            self._there.synchronize()
        return self._host


def to_device(numbers: Any, device: torch.device) -> torch.Tensor:
    """A float64 tensor on the device of numbers, lists of numbers, and so on. (`torch.tensor(..., device=device)` waits
    for all that the device was given before.)"""
    host = torch.tensor(numbers, dtype=torch.float64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
