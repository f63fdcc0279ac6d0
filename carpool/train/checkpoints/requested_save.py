"""`carpool checkpoint RUN`: a run saves a checkpoint when a file in its folder asks for one, and goes on.

the command    RUN/save_request, empty                      from any node that sees the folder, whatever started the run
rank 0         sees it in a step, in whose reduction all ranks learn of it
all ranks      save after the step; rank 0 has renamed it to save_request.taken
rank 0         the checkpoint is whole: writes its path into that file, or why there is none
the command    removes the file, and prints the path
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.records.run_folder import is_written, replace_text

# Of a checkpoint that no step has begun to save; and of one that a step has.
REQUEST, _TAKEN = "save_request", "save_request.taken"
_PAUSE_SECONDS, _LOOKS = 0.1, 20


def take(run: Path) -> None:
    """The checkpoint that is saved next is the one that is waited for. On rank 0."""
    with suppress(OSError):  # whoever asked has gone
        (run / REQUEST).rename(run / _TAKEN)


def answer(run: Path, path: Path | None, why: str = "") -> None:
    """Tell whoever waits where it is, or, if it is None, why. On rank 0."""
    with suppress(OSError):
        if (run / _TAKEN).stat().st_size == 0:
            shown = None if path is None else str(path.relative_to(run))
            replace_text(run / _TAKEN, json.dumps({"path": shown, "why": why}))


def forget(run: Path) -> None:
    """Remove what a command that was killed has left."""
    for name in (REQUEST, _TAKEN):
        (run / name).unlink(missing_ok=True)


def request(run: Path) -> Path:
    """Ask a run for a checkpoint, and wait for it: its path.

    Raises:
        ValueError: no run is writing into the folder, or it ends before, or it is asked already.
        CheckpointWriteError: it could not be written."""
    if not is_written(run):
        latest = CheckpointManager(run).latest()
        has = f"its newest checkpoint is {latest}" if latest else "it has no checkpoint"
        raise ValueError(f"no run is writing into {run} now: {has}")
    taken = run / _TAKEN
    for _ in range(_LOOKS):  # another command may be about to read its answer; one that was killed never does
        if not taken.exists():
            break
        time.sleep(_PAUSE_SECONDS)
    try:
        if taken.exists() and not taken.stat().st_size:
            raise FileExistsError
        taken.unlink(missing_ok=True)
        (run / REQUEST).touch(exist_ok=False)
    except FileExistsError:
        raise ValueError(
            f"{run} is asked for a checkpoint already: wait for that, or delete {run / REQUEST}*"
        ) from None
    try:
        while True:
            for _ in range(_LOOKS):
                time.sleep(_PAUSE_SECONDS)
                if taken.is_file() and (text := taken.read_text(encoding="utf-8")):
                    found = json.loads(text)
                    if found["path"] is None:
                        raise CheckpointWriteError(found["why"])
                    return run / found["path"]
            if not is_written(run):
                latest = CheckpointManager(run).latest()
                raise ValueError(f"the run in {run} has ended before it saved a checkpoint; its newest one is {latest}")
    finally:
        forget(run)
