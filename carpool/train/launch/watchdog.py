"""Ends a process whose main thread cannot notice any more that a rank is missing.

A kernel that waits in vain for a peer gives up and writes so to host memory. The main thread looks there at its next
ride, and raises. But it may be inside a collective with the same peer, which never gives up and cannot be interrupted.
So another thread looks too, and ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from carpool.train.launch.worker import end_process
from carpool.transport import RankMissingError
from carpool.transport.nvlink import Buffers

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0


class Watchdog:
    """A daemon thread that looks at `Buffers.host_status`, which is host memory.

    If a rank is missing and `stop` has not been called `grace` seconds later, it logs and records which, and ends the
    process with exit code 1.

    Args:
        buffers: gives the buffers of the moment.
        grace: seconds for the main thread to raise the same by itself, and to stop this thread on its way out.
    """

    def __init__(self, buffers: Callable[[], Sequence[Buffers]], grace: float = GRACE_SECONDS) -> None:
        self._buffers, self._grace = buffers, grace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="carpool-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. The thread lets go of what it looked at before this returns."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(POLL_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            for buffers in self._buffers():
                try:
                    buffers.check()
                except RankMissingError as error:
                    self._end(error)

    def _end(self, error: RankMissingError) -> None:
        if not self._stopped.wait(self._grace):
            end_process(error)
