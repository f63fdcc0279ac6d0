"""What a run needed: versions, devices, commit. Written beside a result, to trace it; hence no host name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch


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
    root = Path(__file__).resolve().parents[3]
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
