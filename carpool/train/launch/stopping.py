"""Stopping a run without losing a step: what SIGTERM and SIGUSR1 do.

Slurm sends SIGTERM when it takes nodes away, and the signal that `--signal=USR1@120` names some time before the end.

    1. the signal is noted: by Carpool's agent, which passes it on to its ranks, or by the ranks themselves
    2. at the end of the step all ranks learn of it, from one more number in a reduction that they do anyway
    3. they write a checkpoint, say so, and exit with code 75

A second signal, one second or more after the first, ends the run at once. So does a first one while a run is being set
up, when there is nothing to lose, and so do Ctrl-C and SIGHUP always.

Why 75: it is EX_TEMPFAIL of sysexits.h, "try again". The usual 128 + number of the signal says that the signal ended
the process, so that the steps since the last checkpoint are lost; a script that requeues has to tell the two apart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_STOPPED = 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# The folder in which a rank leaves its process id while it listens; set by Carpool's agent.
LISTENERS = "CARPOOL_LISTENERS"
# Whoever signals a whole process group reaches a rank twice, once through the agent. That is one wish, not two.
_SAME_WISH_SECONDS = 1.0


class Stopped(RuntimeError):
    """The run was asked to stop, and did so after a checkpoint. Not a failure. `signal`: the name of what asked it."""

    exit_code = EXIT_STOPPED

    def __init__(self, text: str, signal: str | None = None) -> None:
        super().__init__(text)
        self.signal = signal


class StopRequest:
    """In a rank: notes SIGTERM and SIGUSR1 for as long as it is entered.

    Attributes:
        signum: the first such signal; 0 if none has come. Another rank may have been asked: reduce it over ranks.
    """

    def __init__(self) -> None:
        self.signum, self._since = 0, 0.0
        self._before: dict[int, Any] = {}
        folder = os.environ.get(LISTENERS)
        self._listener = Path(folder, str(os.getpid())) if folder else None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            if self._listener is not None:
                self._listener.touch()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.unlink(missing_ok=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._since = number, time.monotonic()
        elif time.monotonic() - self._since >= _SAME_WISH_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Relay:
    """In the agent: passes the first SIGTERM or SIGUSR1 on to its ranks, and calls `leave` if that is not enough.

    Args:
        folder: where ranks say that they listen (`LISTENERS`).
        ranks: how many there are.
        leave: ends them at once; raises.
    """

    def __init__(self, folder: Path, ranks: int, leave: Callable[[int], None]) -> None:
        self.folder, self.ranks, self.leave = folder, ranks, leave
        self._since: float | None = None

    def __enter__(self) -> Relay:
        self.folder.mkdir(exist_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        """Handlers are put back by whoever starts the agent, which installs some of its own."""

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since < _SAME_WISH_SECONDS:
            return
        pids = [int(path.name) for path in self.folder.iterdir()]
        if self._since is not None or len(pids) < self.ranks:
            self.leave(number)
        self._since = now
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        name = signal.Signals(number).name
        sys.stderr.write(f"{name}: the step is finished and a checkpoint written; once more to leave at once\n")
