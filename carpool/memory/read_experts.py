"""Single experts of a checkpoint's files, read by threads into a cache in host memory, from where a device copies.

    expert 5 of layer 3    in the cache: the device copies it from there
    expert 9 of layer 3    a thread reads it into a slot of the cache, and then asks the device to copy it

The kernel keeps what was read in memory that is free. The cache is page-locked, and gives up first what is least likely
to be wanted (MoE-Infinity, arXiv 2401.14361; MoESys, arXiv 2205.10034, by how often and how lately it was wanted).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from carpool.memory.expert_cache import ExpertCache, Priority, expert_bytes

# One thread copies from mapped files at about 2 GB/s.
_THREADS = 4


class ExpertFiles(Protocol):
    """Experts on disk."""

    def read(self, layer: int, expert: int, into: Sequence[torch.Tensor]) -> None:
        """Copy an expert's parameters to memory, in the order of its module's. Threads call it."""


class ExpertReader:
    """Reads experts and has them copied.

    Args:
        layers: of each layer its parameters.
        host_bytes: of the cache. At least two layers' are taken.
        stream: of the device, on which it copies; None on a CPU.
    """

    def __init__(
        self,
        files: ExpertFiles,
        layers: Sequence[Sequence[torch.Tensor]],
        host_bytes: int,
        device: torch.device,
        stream: Any,
    ) -> None:
        self._files, self._stream, self.bytes_read = files, stream, 0
        least = 2 * max(expert_bytes(layer) * layer[0].shape[0] for layer in layers)
        self._cache = ExpertCache(layers, max(host_bytes, least), device, host=True)
        # By slot: when the device has copied what is in it.
        self._copied: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "carpool-experts")

    def bring(
        self,
        layer: int,
        expert: int,
        copy: Callable[[Sequence[torch.Tensor]], None],
        priority: Priority | None,
        stay: Collection[int],
    ) -> Future[None] | None:
        """Have an expert copied.

        Args:
            copy: asks the device to copy it, given its parameters in host memory. It may be called by a thread.
            priority, stay: as `ExpertCache.put`. Two layers may stay.

        Returns:
            What ends when `copy` was called; None: it was.
        """
        values = self._cache.find(layer, expert)
        if values is not None:
            copy(values)
            self._note(self._cache.slot_of(layer, expert))
            return None
        values = self._cache.put(layer, expert, priority, stay)
        assert values is not None, "there is room for two layers"
        self.bytes_read += sum(value.nbytes for value in values)
        return self._threads.submit(self._read, layer, expert, values, copy, self._cache.slot_of(layer, expert))

    def _read(
        self,
        layer: int,
        expert: int,
        values: Sequence[torch.Tensor],
        copy: Callable[[Sequence[torch.Tensor]], None],
        slot: int,
    ) -> None:
        if (copied := self._copied.get(slot)) is not None:
            copied.synchronize()
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad():
            self._files.read(layer, expert, values)
            with stream:
                copy(values)
                self._note(slot)

    def _note(self, slot: int) -> None:
        self._copied[slot] = None if self._stream is None else torch.cuda.current_stream().record_event()
