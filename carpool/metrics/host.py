"""What the host learns from the device, and when: how long work takes, and numbers that are copied without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Took(NamedTuple):
    """Milliseconds until all was done, and until the host had asked for all."""

    ms: float
    host_ms: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Of each value the largest of all ranks; without a process group, as they are. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def timed(work: Callable[[], object], device: torch.device) -> Took:
    """Time some work that all ranks begin together, on the slowest rank. Collective, if there is a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    work()
    asked = time.perf_counter()
    synchronize(device)
    done = time.perf_counter()
    return Took(*slowest([1e3 * (done - begin), 1e3 * (asked - begin)], device))


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
