"""Stopping a run without losing a step: what SIGTERM and SIGUSR1 do.

Slurm sends SIGTERM when it takes nodes away, and the signal that `--signal=USR1@120` names some time before the end.
PyTorch's agent would pass it on to whole process groups, and kill who has not ended after 30 s (before 2.12, always).

    1. the signal is noted: by Carpool's agent, which passes it on to its ranks, or by the ranks themselves
    2. at the end of the step all ranks learn of it, from one more number in a reduction that they do anyway
    3. they write a checkpoint, say so, and exit with code 75

While a run is being set up there is nothing to lose: a first signal ends it at once, with code 75, too. A second
signal, one second or more after the first, ends the run at once with 128 + its number, and so do Ctrl-C and SIGHUP
always. After the last step a first signal changes nothing: the run ends as it would have.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_STOPPED = 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# The folder in which a rank leaves its process id while it listens, with this suffix after its last step; set by the
# agent.
LISTENERS, DONE = "CARPOOL_LISTENERS", ".done"
# Whoever signals a whole process group reaches a rank twice, once through the agent. That is one wish, not two.
_SAME_WISH_SECONDS = 1.0


class Stopped(RuntimeError):
    """The run was asked to stop, and did so after a checkpoint, or before its first step. Not a failure. `signal`: the
    name of what asked it."""

    exit_code = EXIT_STOPPED

    def __init__(self, text: str, signal: str | None = None) -> None:
        super().__init__(text)
        self.signal = signal


def in_setup(name: str) -> str:
    """What is said of a run that a signal of this name has ended before its first step."""
    return (
        f"stopped by {name} while the run was being set up, so that nothing is lost: give the same command again, with "
        "training.resume_from_checkpoint=auto"
    )


def _leaves_setup(number: int, frame: FrameType | None) -> None:
    """While this is the handler, the thread of `leaves_setup` ends the process."""


@contextlib.contextmanager
def leaves_setup() -> Iterator[None]:
    """Inside, until a `StopRequest` or a `Relay` listens, SIGTERM and SIGUSR1 end the process with code 75.

    Python runs a handler between two of its own instructions, and a rank that waits for others, or imports a library,
    may come to none for minutes. So a thread is woken by the signal itself, and leaves.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while number := os.read(read, 1)[0]:
            if signal.getsignal(number) is not _leaves_setup:
                continue
            if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
                with contextlib.suppress(OSError):
                    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
                    os.write(2, f"{show_cursor}{in_setup(signal.Signals(number).name)}\n".encode())
            os._exit(EXIT_STOPPED)

    def forget() -> None:
        # A forked process has no such thread; what it is sent is not for this one, whose pipe it would write to.
        if signal.getsignal(signal.SIGTERM) is _leaves_setup:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _leaves_setup) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _leaves_setup:
                signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)


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
        if self._listener is not None and self._listener.exists():
            self._listener.rename(self._listener.with_suffix(DONE))
        for number, handler in self._before.items():
            # What is left is to leave; that is no set-up.
            signal.signal(number, signal.SIG_IGN if handler is _leaves_setup else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._since = number, time.monotonic()
        elif time.monotonic() - self._since >= _SAME_WISH_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Relay:
    """In the agent: passes the first SIGTERM or SIGUSR1 on to its ranks, and calls `leave` if that is not enough. At
    the end all handlers are as before: PyTorch's agent sets some, too.

    Args:
        folder: where ranks say that they listen (`LISTENERS`).
        ranks: how many there are.
        leave: ends them at once; raises.

    Attributes:
        signum: of the signal that has ended them at once; 0 if none has.
        in_setup: whether that was before their first step.
    """

    def __init__(self, folder: Path, ranks: int, leave: Callable[[int], None]) -> None:
        self.folder, self.ranks, self.leave = folder, ranks, leave
        self.signum, self.in_setup = 0, False
        self._since: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        self.folder.mkdir(exist_ok=True)
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            others = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
            self._before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, *others)}
            for number in STOP_SIGNALS:
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since < _SAME_WISH_SECONDS:
            return
        listeners = list(self.folder.iterdir())
        pids = [int(path.name) for path in listeners if path.suffix != DONE]
        self.in_setup = self._since is None and len(listeners) < self.ranks
        if self._since is not None or self.in_setup:
            self.signum = number
            self.leave(number)
        self._since = now
        if len(pids) < self.ranks:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        name = signal.Signals(number).name
        sys.stderr.write(f"{name}: the step is finished and a checkpoint written; once more to leave at once\n")
