"""How long work takes by the clock of the host, until the device has done it, on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
