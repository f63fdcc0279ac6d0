"""Which rank failed first, and the one message about it that a user sees.

When a rank dies, the others fail too: their collectives break, or the agent stops them. `first_cause` tells the cause
from these consequences. `rank_failure` makes the message: what happened to that rank, what it wrote, and how to go on.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.train.launch.stopping import Stopped

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from carpool.train.config import Config

# A crash shows where each thread was.
_LOG_TAIL_LINES = 40

# The agent waits longer than that before it kills a rank that does not stop.
_PATIENCE_SECONDS = 5
# What peers of a failed rank raise: consequences, never the cause that a person looks for.
_CONSEQUENCES = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "BrokenPipeError",
)
# What says itself which rank is missing.
_MISSING = ("RankMissingError", "RanksLostError")
_CONSEQUENCE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo/transport",
    # What a second collective says after the first one took too long.
    "Application timeout caused pair closure",
)


_LESS_MEMORY = (
    "Memory was not enough. --dry-run predicts what a rank needs. Less is needed with memory=auto, with a lower "
    "training.per_device_train_batch_size (and more training.gradient_accumulation_steps), or with more ranks"
)


class RankFailure(RuntimeError):
    """A rank that this process started has failed, and the others were stopped.

    Attributes:
        rank: The rank that failed first.
        pid: Its process on this machine.
        exit_code: Its exit code; negative: the signal that killed it.
        user_error: Did it refuse something that a user can put right? Then `str(self)` is that alone.
        traceback: Python's traceback in that rank, or "".
    """

    def __init__(self, text: str, *, rank: int, pid: int, exit_code: int, user_error: bool, traceback: str) -> None:
        super().__init__(text)
        self.rank, self.pid, self.exit_code = rank, pid, exit_code
        self.user_error, self.traceback = user_error, traceback


class Interrupted(RuntimeError):
    """A signal (Ctrl-C: SIGINT) ended the run; all ranks were stopped. `signum` is its number."""

    def __init__(self, text: str, signum: int) -> None:
        super().__init__(text)
        self.signum = signum


def first_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose failure caused the others, of failures in the order in which they were noticed.

    In this order: a rank that a signal killed; one with an error of its own; one that aborted or left without a
    word; one that waited in vain for others and names them; one that lost the connection to a peer; one that was told
    to stop by SIGTERM, or, because it did not, killed. Nobody was told before something had failed: if a SIGTERM came
    first of all, it came from outside, and so did a SIGKILL soon after the first failure.
    """
    first = next(iter(failures))
    began = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        error = _error_of(failure)
        if error:
            kind = 3 if error["type"] in _MISSING else 4 if _is_consequence(error) else 1
            return kind, int(error.get("time_ns", 0))
        told = failure.exitcode == -signal.SIGTERM and rank != first
        if told or (failure.exitcode == -signal.SIGKILL and failure.timestamp - began >= _PATIENCE_SECONDS):
            return 5, 0
        return (0 if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT else 2), 0

    return min(failures, key=order)


def stopped_text(failures: Mapping[int, ProcessFailure]) -> str | None:
    """What the ranks say if they have stopped because they were asked to, after a checkpoint; None if they failed."""
    error = _error_of(failures[first_cause(failures)])
    return str(error["text"]) if error.get("type") == Stopped.__name__ else None


def _error_of(failure: ProcessFailure) -> dict[str, Any]:
    """What the rank recorded of its own error (`carpool.train.launch.worker.record_error`), or {}."""
    error = failure.error_file_data.get("carpool")
    return error if isinstance(error, dict) else {}


def _is_consequence(error: Mapping[str, Any]) -> bool:
    return is_consequence(error["type"], error["text"])


def is_consequence(kind: str, text: str) -> bool:
    """Whether an error, by the name of its class and its text, is what a rank raises because another has failed."""
    return kind in _CONSEQUENCES or any(one in text for one in _CONSEQUENCE_TEXTS)


def rank_failure(
    failures: Mapping[int, ProcessFailure], ranks: int, config: Config, logs: Path, started: float
) -> RankFailure:
    """The error to raise when ranks have failed.

    Args:
        failures: By rank, in the order in which they were noticed; not empty.
        ranks: How many ranks there were.
        config: Says where checkpoints are.
        logs: The agent's folder of logs, which has what ranks other than 0 wrote.
        started: When the ranks were started, in seconds since the epoch.
    """
    rank = first_cause(failures)
    failure = failures[rank]
    error = _error_of(failure)
    user_error = bool(error.get("user_error"))
    if user_error:
        lines = [error["text"]]
        # The run may have got far before it met the error (a full disk, a loss that is not a number).
        if any(_changed(path) >= started for path in _checkpoints(config)):
            lines.append(_sentence(resume_hint(config)))
    else:
        stopped = {1: "", 2: "; the other rank was stopped"}.get(ranks, f"; the other {ranks - 1} ranks were stopped")
        lines = [f"rank {rank} (pid {failure.pid}) {_what_happened(failure, error)}{stopped}"]
        if error and _lacked_memory(error):
            lines.append(_LESS_MEMORY)
        if not error:
            lines += [f"  {line}" for line in _log_tail(logs, failure.local_rank)]
        lines.append(_sentence(resume_hint(config)))
    return RankFailure(
        "\n".join(lines),
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        user_error=user_error,
        traceback=str(error.get("traceback", "")),
    )


def _lacked_memory(error: Mapping[str, Any]) -> bool:
    """As of the device (`torch.OutOfMemoryError`) or of the host (PyTorch's allocator, Python's)."""
    return error["type"] in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in error["text"]


def _what_happened(failure: ProcessFailure, error: Mapping[str, Any]) -> str:
    if error:
        return f"failed: {error['type']}: {error['text']}"
    if failure.exitcode >= 0:
        return f"exited with code {failure.exitcode}"
    number = -failure.exitcode
    names = {known.value: known.name for known in signal.Signals}
    hint = " (by hand, or by the kernel for lack of memory: see dmesg)" if number == signal.SIGKILL else ""
    return f"was killed by {names.get(number, f'signal {number}')}{hint}"


def resume_hint(config: Config) -> str:
    """How to go on after a failure, depending on what has been saved."""
    saved = _checkpoints(config)
    if saved:
        return f"continue from {saved[-1]} with the same command and training.resume_from_checkpoint=last"
    from carpool.train.records.run_folder import METRICS

    folder = config.training.folder
    if (folder / METRICS).exists():
        return (
            f"no checkpoint was written to {folder} yet: begin again with the same command and "
            "training.resume_from_checkpoint=auto"
        )
    return f"no checkpoint was written to {folder} yet, so start again"


def _checkpoints(config: Config) -> list[Path]:
    folder = config.training.folder / "checkpoints"
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit())


def _changed(path: Path) -> float:
    """When a folder last changed, in seconds since the epoch; 0 if it is gone by now."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _log_tail(logs: Path, local_rank: int) -> list[str]:
    lines: list[str] = []
    for file in sorted(logs.glob(f"*/attempt_*/{local_rank}/*.log")):
        lines += file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return lines
