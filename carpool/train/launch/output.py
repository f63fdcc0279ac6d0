"""Output that may be closed while a run goes on: `carpool train ... | head`, a terminal that is gone, a full disk.

Who reads the output is not who needs the run. The first write that fails is said on the other stream, and what follows
goes to /dev/null; the numbers of a run are in its metrics.jsonl in any case.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class _Lasting:
    """A stream whose writes do not fail."""

    def __init__(self, stream: TextIO, name: str, other: str) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
            return
        except OSError as failed:
            error = failed
        # Below Python: what is buffered still has to go somewhere, and native code writes, too.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        other = getattr(sys, self._other)
        other.write(
            f"warning: standard {self._name} cannot be written any more ({error.strerror}); the run goes on, and its "
            "numbers are in metrics.jsonl\n"
        )
        other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, a closed standard output or error ends nothing."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Closed before Python started: a file of the run's must not get this number, here or in a rank.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number that is free
    # Python has None for what was closed, and libraries write to it.
    null: TextIO = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    before = sys.stdout or null, sys.stderr or null
    out: Any = _Lasting(before[0], "output", "stderr")
    error: Any = _Lasting(before[1], "error", "stdout")
    sys.stdout, sys.stderr = out, error
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
