"""Work of a thread beside training, such as a copy of its state (`sparse_snapshots`, `expert_copies`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from carpool.train.launch.failure import is_consequence


class Beside:
    """Work beside a step, by a thread: first a copy of what the next update changes, then the rest."""

    def __init__(self, device: torch.device, doing: str) -> None:
        self._device, self._doing = device, doing
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._copied = threading.Event()
        self._copied.set()

    def begin(self, work: Callable[[torch.cuda.Stream | None, Callable[[], None]], None]) -> None:
        """Waits for the work before, and begins this. `work(stream, copied)`: on whose stream tensors of a GPU are
        copied, and what it calls when all are."""
        self.wait()
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._copied.clear()

        def run() -> None:
            try:
                work(stream, self._copied.set)
            except Exception as error:  # raised where it is waited for
                self._error = error
            finally:
                self._copied.set()

        self._thread = threading.Thread(target=run, name="carpool-snapshot", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Until the copy that was begun is there. Raises OSError; ConnectionError where another rank is gone."""
        self._copied.wait()
        if (error := self._error) is not None:
            gone = is_consequence(type(error).__name__, str(error))
            raise (ConnectionError if gone else OSError)(f"{self._doing}: {error}") from error

    def wait(self) -> None:
        """Until all is done. Raises as `settle`."""
        if self._thread is not None:
            self._thread.join()
        self.settle()
