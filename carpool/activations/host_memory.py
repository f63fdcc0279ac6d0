"""Page-locked host memory of exactly the requested size, for asynchronous copies from and to a device.

PyTorch's own pinned allocator rounds sizes up to a power of two, which for the state of a large model may double it.
Here memory is mapped, which the kernel fills with zeros, and then registered with CUDA. On a CPU device it stays plain
memory.

A run adds up its need of host memory before it allocates any (`check_host_memory`), because a machine that runs out of
host memory kills processes without a message.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

# Share of the free memory that may be taken. The rest is for data, checkpoints being written, and other processes.
SHARE = 0.95
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in page-locked host memory, which `device` copies asynchronously.

    Raises:
        RuntimeError: CUDA cannot lock that much.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or size == 0:
        return torch.zeros(*shape, dtype=dtype)
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A hint, which kernels without huge pages refuse.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory, cuda = torch.frombuffer(mapping, dtype=dtype), torch.cuda.cudart()
    if error := int(cuda.cudaHostRegister(memory.data_ptr(), size, 0)):
        raise RuntimeError(
            f"CUDA cannot lock {size / 2**30:.1f} GiB of host memory (error {error}): raise the limit of locked memory "
            "(ulimit -l unlimited; in a container --ulimit memlock=-1), or keep less there"
        )
    mapping.unregister = partial(cuda.cudaHostUnregister, memory.data_ptr())
    return memory.view(*shape)


class _Mapping(mmap.mmap):
    """Mapped memory that is unregistered from CUDA before it is unmapped."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def event_now(device: torch.device) -> Any:
    """An event behind all work queued on the current stream so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(*events: Any) -> None:
    """Let the current stream wait for these events; None is skipped."""
    for event in events:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def on_stream(stream: Any, *events: Any) -> AbstractContextManager[Any]:
    """Inside, work is queued on `stream`, behind these events. `stream` is None on a CPU, where work runs at once."""
    if stream is None:
        return nullcontext()
    for event in events:
        if event is not None:
            stream.wait_event(event)
    return cast("AbstractContextManager[Any]", torch.cuda.stream(stream))


class HostPool:
    """Buffers of host memory that are taken and given back. They keep their addresses and are never freed, so a CUDA
    graph may copy to them and from them at each replay, as long as the steps before it have taken as much.

    One stream runs all copies to and from the buffers, so the copies of a buffer's next user run behind those of its
    last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self.bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """At least so many bytes, and less than twice as many.

        Raises:
            RuntimeError: there is no free buffer of that size, and a CUDA graph is captured."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        fit = [(one.numel(), place) for place, one in enumerate(self._free) if size <= one.numel() < 2 * size]
        if fit:
            # Buffers that are given back meanwhile are appended.
            return self._free.pop(min(fit)[1])
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("what goes to host memory is of other sizes than in the steps before")
        self.bytes += size
        return host_zeros((size,), torch.uint8, self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        if buffer.numel():
            self._free.append(buffer)


def free_host_memory() -> int | None:
    """Free bytes of this machine, or of this container if its limit is lower; None: unknown."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        caches = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return free
    if limit != "max":
        # File caches count as used, but are evicted when memory is requested.
        used -= next((int(line.split()[1]) for line in caches if line.startswith("inactive_file ")), 0)
        left = max(0, int(limit) - used)
        free = left if free is None else min(free, left)
    return free


def check_host_memory(
    needed: int,
    what: str,
    ranks: int = 1,
    free: int | None = None,
    advice: str = "Keep moments in fewer bits (training.optimizer_state_dtype = 'int8'), use more machines, or keep "
    "them on the device",
) -> None:
    """Raise ValueError if the ranks of this machine cannot all take so much host memory.

    Args:
        needed: bytes of one rank.
        what: what the memory is for, for the message.
        ranks: on this machine.
        free: free bytes of this machine; None: as measured now.
        advice: what to do, a sentence.
    """
    free = free_host_memory() if free is None else free
    if free is not None and needed * ranks > SHARE * free:
        raise ValueError(
            f"{what} of {ranks} ranks of this machine need {needed * ranks / 2**30:.1f} GiB of host memory, and "
            f"{free / 2**30:.1f} GiB are free. {advice}"
        )
