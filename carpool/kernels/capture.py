"""Capturing a CUDA graph, and leaving nothing behind where that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from carpool.kernels.graph_launches import launches


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Inside, work of this thread and of autograd's goes into `graph`. Other threads may use the device meanwhile.

    Python collects no garbage inside: what it frees may ask the device for something that a capture does not allow.

    Args:
        pool: of `torch.cuda.graph_pool_handle`; default: one of its own.

    Raises:
        Exception: what was raised inside, or by the end of the capture. The graph is void then; memory, streams and
            random numbers are as before.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    stream, first = torch.cuda.current_stream(), None
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=_stream(stream.device), capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                first = error
                raise
    except Exception as error:
        # PyTorch leaves these undone if the end of the capture fails too, and says only that.
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        # The old state takes itself for captured, and draws no number any more.
        generator = torch.cuda.default_generators[stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        if first is not None and first is not error:
            raise first from None
        raise
    finally:
        if was_enabled:
            gc.enable()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """On which work is captured. Kernels of a graph keep its priority, and go before what runs beside them on ordinary
    streams (`carpool.optim.in_backward`)."""
    return torch.cuda.Stream(device, priority=-1)


class Recorder:
    """Records pieces of work as CUDA graphs that share one pool of memory, and are replayed in the order in which they
    were recorded: what one of them frees, a later one uses."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats the work, which is not done now.

        Raises:
            Exception: as `capturing`."""
        from carpool.kernels.stamps import stamp_buffer

        graph = torch.cuda.CUDAGraph()
        stamp_buffer(torch.device("cuda", torch.cuda.current_device()))  # cannot be made in a capture
        launches.counted = True
        try:
            # Another thread puts batches into pinned memory meanwhile.
            with capturing(graph, self.pool):
                work()
        finally:
            launches.counted = False

        def again() -> None:
            # Looked up at each call, so that a benchmark can time it.
            graph.replay()
            launches.count()

        return again
