"""On which stream a verb runs, and who waits for it. What it does to a row: `transport.py`.

    options          launched                               the caller's stream waits
    default          on the caller's stream                 as for any kernel before it
    side_stream      on the stream of rides                 at `Pending.wait`, for an event
    split            in two halves, on the caller's stream  for what the second half awaits: `Pending.wait` launches it

A verb that ends a ride gives its lease back as soon as it has been launched (with `split`, both halves): the next ride
on it waits for the stream that used it (`Buffers`).
"""

from __future__ import annotations

from typing import Any

import torch

from carpool.transport.base import Pending
from carpool.transport.nvlink.buffers import Buffers, Lease
from carpool.transport.nvlink.options import NVLinkOptions


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
        if self.options.split or self.stream is None:
            return self._run_here(launch)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            launch(True, True)
            done = self.stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return lambda: torch.cuda.current_stream().wait_event(done)

    def _run_here(self, launch: Any) -> Any:
        """The same, on the current stream."""
        if self.options.split:
            launch(True, False)
            return lambda: launch(False, True)
        launch(True, True)
        return lambda: None

    def _after_rides(self) -> None:
        """Let the current stream wait for the rides before: those who wait in kernels, and peers' choices, count on the
        end of the lease's last ride."""
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)

    def _released(self, lease: Lease, finish: Any, value: Any) -> Pending:
        """What is pending after a verb that ends a ride: its lease is free once the verb has been launched."""

        def wait() -> Any:
            finish()
            if self.options.split:
                self.buffers.release(lease)
            return value()

        if not self.options.split:
            self.buffers.release(lease)
        return Pending(wait)
