"""On which stream a verb runs, and who waits for it. What it does to a row: `transport.py`.

    options          launched                    the caller's stream waits
    default          on the caller's stream      as for any kernel before it
    side_stream      on the stream of rides      at `Pending.wait`, for an event

A verb has two halves, `launch(send, receive)`, and one kernel runs both. Where ranks share a process, as in Triton's
interpreter, all of them send before any receives (tests/interpreted/emulated.py).
"""

from __future__ import annotations

from typing import Any

import torch

from carpool.transport.base import Pending
from carpool.transport.nvlink.buffers import Buffers, Lease
from carpool.transport.nvlink.options import NVLinkOptions


def _nothing() -> None:
    """What is left to do where a stream, or a kernel, waits."""


class VerbRunner:
    """Base class of `NVLink`.

    Args:
        buffers: whose leases the verbs hold, and whose stream they run on with `side_stream`.
    """

    def __init__(self, options: NVLinkOptions, buffers: Buffers) -> None:
        self.options, self.buffers = options, buffers
        self.stream = buffers.stream if options.side_stream else None

    def _run(self, launch: Any, *tensors: torch.Tensor) -> Any:
        """Launch a verb; what is returned lets the current stream wait for it."""
        if self.stream is None:
            return self._run_here(launch)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            launch(True, True)
            done = self.stream.record_event()
        if torch.cuda.is_current_stream_capturing():
            # The allocator gives nothing back that another stream has used as long as a graph is captured.
            held = list(tensors)
        else:
            held = []
            for tensor in tensors:
                tensor.record_stream(self.stream)

        def finish() -> None:
            torch.cuda.current_stream().wait_event(done)
            held.clear()

        return finish

    def _run_here(self, launch: Any) -> Any:
        """The same, on the current stream."""
        launch(True, True)
        return _nothing

    def _awaited_by_readers(self, finish: Any) -> Any:
        """Instead of `finish`, where kernels that read the rows wait for them."""
        return _nothing

    def _after_rides(self) -> None:
        """Let the current stream wait for the rides before: those who wait in kernels, and peers' choices, count on the
        end of the lease's last ride."""
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)

    def _released(self, lease: Lease, finish: Any, value: Any) -> Pending:
        """What is pending after a verb that ends a ride. Its lease is free at once: the next ride on it waits for the
        stream that used it (`Buffers`)."""
        self.buffers.release(lease)

        def wait() -> Any:
            finish()
            return value()

        return Pending(wait)
