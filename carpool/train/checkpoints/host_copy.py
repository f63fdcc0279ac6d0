"""State copied to host memory beside the next step: the content of checkpoint files, ready to be written by another
process.

    update of step n | forward and backward of step n+1 ............ | update of step n+1
                     | slice 0 | slice 1 | ... copies, by a thread   | waits until the last one is done

Weights and the optimizer's state change in updates alone. So a copy that begins after an update and ends before the
next is that of the step's end, whatever computes meanwhile. On a GPU each slice is a copy of its own on a stream of its
own, and at most `IN_FLIGHT` are asked for at a time: those of activations, experts or optimizer state that stream over
the same link come between. State that is in host memory already is copied by the thread.

The memory is a file without a name (`memfd_create`), which the writer inherits; /dev/shm would be as good, but is 64
MiB in most containers. It is page-locked once, and kept for the next checkpoint. To page-lock 31.5 GiB took 22 s on a
host of H200 GPUs: so a thread does it beside the first steps (`HostBuffer.prepare`), a part at a time, between which
the driver serves training.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from carpool.train.checkpoints.shard_files import ShardFile, total_bytes

SLICE_BYTES = 64 * 2**20
IN_FLIGHT = 2
# What is page-locked at a time: a multiple of a slice, so that no copy reaches over the end of a part.
PART_BYTES = 16 * SLICE_BYTES


class HostBuffer:
    """Shared host memory of one rank.

    Args:
        device: what is copied from.
        path: a file in /dev/shm that outlives the process; None: memory without a name, which does not.

    Attributes:
        fd: of the file that it is; -1: there is none yet.
    """

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self._device, self._path, self.fd, self.bytes = device, path, -1, 0
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._locked: list[int] = []
        self._preparing: threading.Thread | None = None
        self._ends = threading.Event()

    def prepare(self, size: int) -> None:
        """Begin to reserve so many bytes, and return at once; `reserve` waits for it, and says what went wrong."""

        def run() -> None:
            with suppress(OSError):
                self._reserve(size)

        self._preparing = threading.Thread(target=run, name="carpool-host-memory", daemon=True)
        self._preparing.start()

    @property
    def preparing(self) -> bool:
        """Whether `prepare` is still at work."""
        return self._preparing is not None and self._preparing.is_alive()

    def reserve(self, size: int) -> None:
        """Have at least so many bytes. What was there is lost.

        Raises:
            OSError: there is no more memory.
        """
        self._wait()
        if size > self.bytes:
            self._give_back()
            self._reserve(size)

    def _reserve(self, size: int) -> None:
        if self._path is not None:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        elif hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("carpool-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, size)
        self.memory, self.bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8), size
        for begin in range(0, size, PART_BYTES):
            part = min(PART_BYTES, size - begin)
            if self._ends.is_set():
                return
            if hasattr(os, "posix_fallocate"):
                try:  # an error now, not a bus error in the middle of a copy
                    os.posix_fallocate(self.fd, begin, part)
                except OSError:
                    self._give_back()
                    raise
            address = self.memory.data_ptr() + begin
            # Copies to memory that CUDA could not lock are slower, and as right.
            with self._on_device():
                if self._device.type == "cuda" and not int(torch.cuda.cudart().cudaHostRegister(address, part, 0)):
                    self._locked.append(address)

    def close(self) -> None:
        """Give the memory back."""
        self._ends.set()
        self._wait()
        self._ends.clear()
        self._give_back()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _on_device(self) -> AbstractContextManager[object]:
        """In a thread, CUDA would begin on GPU 0, and take memory there."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _give_back(self) -> None:
        with self._on_device():
            for address in self._locked:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()
        if self.fd >= 0:
            os.close(self.fd)
        self.memory, self.fd, self.bytes = torch.empty(0, dtype=torch.uint8), -1, 0


@torch.no_grad()
def copy_files(files: Mapping[str, ShardFile], buffer: HostBuffer, stream: torch.cuda.Stream | None) -> dict[str, int]:
    """Put the content of files into a buffer, one after the other; the first byte of each. Waits for the copies.

    Args:
        stream: on which tensors of a GPU are copied, after all that it waits for; None: there are none."""
    buffer.reserve(total_bytes(files))
    starts, start = {}, 0
    for name, file in files.items():
        starts[name] = start
        header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        buffer.memory[start : start + len(file.header)].copy_(header)
        start += total_bytes({name: file})
    under_way: deque[torch.cuda.Event] = deque()
    for name, file in files.items():
        for tensor, first in file.placed:
            begin = starts[name] + first
            target = buffer.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(-1)
            with torch.cuda.stream(stream) if tensor.is_cuda else nullcontext():
                for source, part in _slices(tensor.contiguous().view(-1), target, begin):
                    part.copy_(source, non_blocking=True)
                    if source.is_cuda and stream is not None:
                        under_way.append(stream.record_event())
                    if len(under_way) > IN_FLIGHT:
                        under_way.popleft().synchronize()
    for event in under_way:
        event.synchronize()
    return starts


def _slices(source: torch.Tensor, target: torch.Tensor, begin: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of both, what lies between multiples of `SLICE_BYTES` in the buffer, where the target begins at byte `begin`."""
    width = source.dtype.itemsize
    first = min((SLICE_BYTES - begin % SLICE_BYTES) // width, len(source))
    for one in (0, *range(first, len(source), SLICE_BYTES // width)):
        end = first if one == 0 else one + SLICE_BYTES // width
        yield source[one:end], target[one:end]
