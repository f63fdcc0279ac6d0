"""Memory that is a file's: the third tier, below the device's and the host's (ZeRO-Infinity, MoESys).

A file of the whole size is made before anything begins, so that a full disk is noticed then, and is mapped. Nobody
finds it by its name: it is gone when the process is. The kernel writes its pages to the disk when it needs their
memory. A device does not copy from it by itself: what travels goes through page-locked buffers (`Staging`), which a
thread fills ahead and empties behind.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from carpool.activations.host_memory import SHARE, host_zeros

# One is computed with, one comes and one goes; and one more, so that nobody waits for its turn.
BUFFERS = 4


def mapped_zeros(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in a new file of a folder.

    Raises:
        ValueError: the file cannot be made; says how large it is.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    try:
        handle, name = tempfile.mkstemp(prefix=".carpool-", dir=folder)
        try:
            # First of all: to find room can take minutes, and who is killed then leaves nothing behind.
            os.unlink(name)
            os.posix_fallocate(handle, 0, size)
            memory = torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
    except OSError as error:
        raise ValueError(
            f"no file of {size / 2**30:.1f} GiB can be made in {folder} ({error.strerror or error}): free some space, "
            "or name another folder (memory.disk_folder)"
        ) from error
    return memory.view(dtype).view(*shape)


def check_disk(needed: int, what: str, folder: Path, ranks: int = 1) -> None:
    """Raise ValueError if the ranks of this machine cannot all write so much to a folder.

    Args:
        needed: bytes of one rank.
        what: is kept there, for the message.
    """
    free = shutil.disk_usage(folder).free
    if needed * ranks > SHARE * free:
        raise ValueError(
            f"{what} of {ranks} ranks of this machine need {needed * ranks / 2**30:.1f} GiB on disk, and {folder} has "
            f"{free / 2**30:.1f} GiB left: free some space, or name another folder (memory.disk_folder)"
        )


class Staging:
    """A `carpool.memory.Staging`: page-locked buffers between mapped memory and a device.

        take A    read now            while A is computed, what followed the last time is read
        give A    written behind, once the device has copied it into its buffer
        take B    is there already

    One thread reads and writes in the order in which it is asked to. So what is read was written before, but for what
    was read ahead: it is read again if something is written there.

    Args:
        device: that copies.

    Attributes:
        bytes_read, bytes_written: so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        # Of each buffer: what waits until it may be used again.
        self._free: list[tuple[int, Callable[[], object] | None]] = []
        self._thread = ThreadPoolExecutor(1, "carpool-disk")
        self._ahead: dict[Hashable, tuple[int, list[torch.Tensor], Future[None]]] = {}
        self._taken: dict[Hashable, tuple[int, list[torch.Tensor]]] = {}
        self._parts: dict[Hashable, Sequence[torch.Tensor]] = {}
        # What was taken after these two.
        self._next: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = None, None
        self.bytes_read = self.bytes_written = 0

    def take(self, name: Hashable, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._parts[name] = parts
        self._next[self._last] = name
        self._last = self._last[1], name
        if name not in self._ahead:
            self._read(name)
        place, views, read = self._ahead.pop(name)
        read.result()
        self._taken[name] = place, views
        following = self._next.get(self._last)
        if following is not None and following not in self._ahead and following not in self._taken:
            self._read(following)
        return views

    def release(self, name: Hashable, event: Any) -> None:
        place, _ = self._taken.pop(name)
        self._free.append((place, None if event is None else event.synchronize))

    def put(self, name: Hashable, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._parts[name] = parts
        self._taken[name] = self._buffer(parts)
        return self._taken[name][1]

    def give(self, name: Hashable, event: Any) -> None:
        place, views = self._taken.pop(name)
        parts = self._parts[name]
        self.bytes_written += sum(part.nbytes for part in parts)
        for other in list(self._ahead):
            if any(_overlap(part, theirs) for part in parts for theirs in self._parts[other]):
                self._forget(other)

        def write() -> None:
            if event is not None:
                event.synchronize()
            for part, view in zip(parts, views, strict=True):
                part.copy_(view)

        self._free.append((place, self._thread.submit(write).result))

    def flush(self) -> None:
        for name in list(self._ahead):
            self._forget(name)
        self._last = None, None
        for _, wait in self._free:
            if wait is not None:
                wait()

    def _forget(self, name: Hashable) -> None:
        """Give up what was read ahead."""
        place, _, read = self._ahead.pop(name)
        read.result()
        self._free.append((place, None))

    def _read(self, name: Hashable) -> None:
        parts = self._parts[name]
        self.bytes_read += sum(part.nbytes for part in parts)
        place, views = self._buffer(parts)

        def read() -> None:
            for part, view in zip(parts, views, strict=True):
                view.copy_(part)

        self._ahead[name] = place, views, self._thread.submit(read)

    def _buffer(self, parts: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """A buffer that is free, of this size at least, and the places of the parts in it."""
        starts, size = [], 0
        for part in parts:
            starts.append(size)
            size += -(-part.nbytes // 256) * 256
        if len(self._buffers) < BUFFERS:
            self._buffers.append(host_zeros((size,), torch.uint8, self._device))
            place = len(self._buffers) - 1
        else:
            if not self._free:  # what was read ahead was not wanted next
                self._forget(next(iter(self._ahead)))
            place, wait = self._free.pop(0)
            if wait is not None:
                wait()
            if self._buffers[place].numel() < size:
                self._buffers[place] = host_zeros((size,), torch.uint8, self._device)
        buffer = self._buffers[place]
        return place, [
            buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
            for start, part in zip(starts, parts, strict=True)
        ]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


class DiskTier:
    """The `carpool.memory.Tier` "disk"."""

    BUFFERS = BUFFERS
    zeros = staticmethod(mapped_zeros)
    staging = Staging
    check = staticmethod(check_disk)
