"""What the host learns from the device, and when: how long work takes, and numbers that are copied without waiting.

And what it runs on: versions, devices, commit (`environment`). Written beside a result, to trace it; no host name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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


def device_name(device: torch.device) -> str:
    """A GPU's own name, such as "NVIDIA H100 80GB HBM3"; of others their kind, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Versions and devices as plain JSON values; what is not there is None."""
    cuda = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device_count": world_size,
        "cpus": os.cpu_count(),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "cpu: " + next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"cpu: {platform.processor() or platform.machine()}"


def _commit() -> str | None:
    """The commit of Carpool itself, when it runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: the allocator's on CUDA, the resident set's elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
