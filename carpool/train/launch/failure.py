"""An error of a rank: how the rank records it, which rank failed first, and the one message that a user sees.

When a rank dies, the others fail too: their collectives break, or the agent stops them. PyTorch's agent names the rank
whose failure it dates first, in whole seconds. `first_cause` tells the cause from these consequences, and
`rank_failure` makes the message: what happened to that rank, what it wrote, and how to go on.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.plugins.redact import redact

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from carpool.train.config import Config

# A crash shows what C++ said, and where threads were.
_LOG_TAIL_LINES = 40
# The agent waits longer than that before it kills a rank that does not stop.
_PATIENCE_SECONDS = 5
# What peers of a failed rank raise: consequences, never the cause that a person looks for.
_CONSEQUENCES = {
    "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "ConnectionResetError",
    "BrokenPipeError",
}  # fmt: skip
# The last is what a second collective says after the first one took too long.
_CONSEQUENCE_TEXTS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport",
    "Application timeout caused pair closure",
)  # fmt: skip
# What says itself which rank is missing.
_MISSING = ("RankMissingError", "RanksLostError")


class RankFailure(RuntimeError):
    """A rank that this process started has failed, and the others were stopped.

    Attributes:
        rank, pid: The rank that failed first, and its process on this machine.
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


def is_user_error(error: BaseException) -> bool:
    """Is the text of this error meant for users, and says what to do? Others are shown with a traceback. These are
    refused input (ValueError), a full disk and the like (OSError), and a loss that is not a number (ArithmeticError),
    but not a lost connection."""
    lost = isinstance(error, (ConnectionError, TimeoutError))
    return isinstance(error, (ValueError, OSError, ArithmeticError)) and not lost


def text_of(error: BaseException) -> str:
    """An error that a user can put right, in words."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def is_consequence(kind: str, text: str) -> bool:
    """Whether an error, by the name of its class and its text, is what a rank raises because another has failed."""
    return kind in _CONSEQUENCES or any(one in text for one in _CONSEQUENCE_TEXTS)


def record_error(error: BaseException) -> None:
    """Write an error where the agent (ours or torchrun's) looks for it, as `torch.distributed.elastic` does, with what
    `first_cause` and `rank_failure` need. The first error stays: what fails after it fails because of it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    now, lines, kind = time.time_ns(), redact("".join(traceback.format_exception(error))), type(error).__name__
    text = redact(text_of(error)) or kind
    ours = {"type": kind, "text": text, "traceback": lines, "time_ns": now, "user_error": is_user_error(error)}
    extra = {"py_callstack": lines, "timestamp": str(now // 10**9)}
    message = {"message": f"{kind}: {text}", "extraInfo": extra}
    # Written beside and renamed: the agent may look, or kill, at any time.
    part = Path(f"{path}.part")
    try:
        part.write_text(json.dumps({"message": message, "carpool": ours}))
        part.replace(path)
    except OSError as full:  # nobody would see the cause behind this one
        logging.getLogger("carpool").error("%s\n%s cannot be written (%s)", lines, path, full.strerror)


def last_words(lines: list[str]) -> list[str]:
    """The end of what a rank wrote. What C++ has said of a crash stands before where threads were, and counts more."""
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return lines[-_LOG_TAIL_LINES:]
    before = max(0, crash - _LOG_TAIL_LINES // 2)
    return lines[before : before + _LOG_TAIL_LINES]


def recorded(failure: ProcessFailure) -> dict[str, Any]:
    """What the rank recorded of its own error, or {}."""
    error = failure.error_file_data.get("carpool")
    return error if isinstance(error, dict) else {}


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
        if error := recorded(failure):
            kind = 3 if error["type"] in _MISSING else 4 if is_consequence(error["type"], error["text"]) else 1
            return kind, error["time_ns"]
        told = failure.exitcode == -signal.SIGTERM and rank != first
        if told or (failure.exitcode == -signal.SIGKILL and failure.timestamp - began >= _PATIENCE_SECONDS):
            return 5, 0
        return (0 if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT else 2), 0

    return min(failures, key=order)


def rank_failure(
    failures: Mapping[int, ProcessFailure], ranks: int, config: Config, logs: Path, started: float
) -> RankFailure:
    """The error to raise when ranks have failed.

    Args:
        failures: By rank, in the order in which they were noticed; not empty.
        ranks: How many ranks there were.
        logs: The agent's folder of logs, which has what ranks other than 0 wrote.
        started: When the ranks were started, in seconds since the epoch.
    """
    from carpool.train.records.run_folder import SUMMARY

    rank = first_cause(failures)
    failure, error, hint = failures[rank], recorded(failures[rank]), resume_hint(config)
    hint = hint[0].upper() + hint[1:]
    user_error = bool(error.get("user_error"))
    if user_error:
        lines = [error["text"]]
        # The run may have got far before it met the error (a full disk, a loss that is not a number), or to its end.
        ended = config.training.folder / SUMMARY
        ended_now = ended.exists() and ended.stat().st_mtime >= started
        if not ended_now and any(path.stat().st_mtime >= started for path in _checkpoints(config)):
            lines.append(hint)
    else:
        stopped = {1: "", 2: "; the other rank was stopped"}.get(ranks, f"; the other {ranks - 1} ranks were stopped")
        lines = [f"rank {rank} (pid {failure.pid}) {what_happened(failure)}{stopped}"]
        # Of the device, or of the host, as PyTorch's allocator and Python say it.
        if error and (error["type"] in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in error["text"]):
            lines.append(
                "Memory was not enough. --dry-run predicts what a rank needs. Less is needed with memory=auto, with a "
                "lower training.per_device_train_batch_size (and more training.gradient_accumulation_steps), or with "
                "more ranks"
            )
        for file in [] if error else sorted(logs.glob(f"*/attempt_*/{failure.local_rank}/*.log")):
            lines += [f"  {line}" for line in last_words(file.read_text(errors="replace").splitlines())]
        lines.append(hint)
    return RankFailure(
        "\n".join(lines), rank=rank, pid=failure.pid, exit_code=failure.exitcode, user_error=user_error,
        traceback=error.get("traceback", ""),
    )  # fmt: skip


def what_happened(failure: ProcessFailure) -> str:
    """To a rank: "was killed by SIGKILL"."""
    if error := recorded(failure):
        return f"failed: {error['type']}: {error['text']}"
    if failure.exitcode >= 0:
        return f"exited with code {failure.exitcode}"
    number = -failure.exitcode
    hint = " (by hand, or by the kernel for lack of memory: see dmesg)" if number == signal.SIGKILL else ""
    return f"was killed by {({one.value: one.name for one in signal.Signals}).get(number, f'signal {number}')}{hint}"


def resume_hint(config: Config) -> str:
    """How to go on after a failure, depending on what has been saved."""
    from carpool.train.records.run_folder import METRICS

    if saved := _checkpoints(config):
        return f"continue from {saved[-1]} with the same command and training.resume_from_checkpoint=last"
    folder = config.training.folder
    auto = ": begin again with the same command and training.resume_from_checkpoint=auto"
    return f"no checkpoint was written to {folder} yet{auto if (folder / METRICS).exists() else ', so start again'}"


def progress(config: Config) -> tuple[Path | None, int]:
    """How far an elastic run has come that failed: the newest checkpoint, by its name alone, and the latest step from
    which a group went on, which may be that of snapshots or copies in memory."""
    from carpool.train.records.run_folder import METRICS

    from_steps, begin = [0], b'{"kind": "recovery"'
    with suppress(OSError, ValueError), (config.training.folder / METRICS).open("rb") as file:
        lines = (line for line in file if line.startswith(begin) and line.endswith(b"\n"))
        from_steps += [json.loads(line)["from_step"] for line in lines]
    return max(_checkpoints(config), default=None), max(from_steps)


def _checkpoints(config: Config) -> list[Path]:
    folder = config.training.folder / "checkpoints"
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
