"""The files of a run directory: how they are written, so that nobody ever reads half of one, and how they are read.

run.json        what the run is: versions, model, mesh, choices. Written at the start, again by each resumed run.
config.toml     the resolved settings
layout.json     where experts live
metrics.jsonl   one line per record (`carpool.train.records.metrics_writer`); locked while a run writes
summary.json    written at the end
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from carpool.plugins.redact import redact

METRICS, INFO, CONFIG, LAYOUT, SUMMARY = "metrics.jsonl", "run.json", "config.toml", "layout.json", "summary.json"
DECISIONS = "decisions"  # the section of run.json
# A folder as peft has them, of a run that trains an adapter.
ADAPTER = "adapter"


def why_not_writable(folder: Path) -> str | None:
    """Why no run directory can be made there; None if it can. Tries, and leaves nothing behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        return f"nothing can be written to it ({error.strerror})"
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    return None


def check_no_run(folder: Path) -> None:
    """Raise ValueError if a run that starts from its beginning would write into another's folder."""
    if (folder / METRICS).exists():
        raise ValueError(
            f"{folder} already holds a run: continue it with training.resume_from_checkpoint=auto (which begins again "
            "where no checkpoint was saved), or choose another training.output_dir (or delete that folder)"
        )


def is_written(folder: Path) -> bool:
    """Whether a run writes into a folder now."""
    try:
        with (folder / METRICS).open("rb") as file:
            return not lock(file)
    except OSError:
        return False


def check_idle(folder: Path) -> None:
    """Raise ValueError if a run writes into a folder now: two at a time would spoil each other's checkpoints."""
    if is_written(folder):
        raise ValueError(
            f"a run is writing into {folder} now: wait until it has ended, stop it (SIGTERM, after a checkpoint), or "
            "choose another training.output_dir"
        )


def lock(file: IO[bytes]) -> bool:
    """Lock a file for as long as it is open, or its process lives. False: another has. True where there are no locks,
    as on some network file systems."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def last_record(folder: Path) -> dict[str, Any]:
    """The last whole line of a run's metrics; {} where there is none."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines(keepends=True)
        return dict(json.loads(next(line for line in reversed(lines) if line.endswith(b"\n"))))
    except (OSError, ValueError, StopIteration):
        return {}


def replace_text(path: Path, text: str) -> None:
    """Writes a file that a reader sees either as it was or whole, also after a power failure; credentials of addresses
    are left out.

    Raises:
        OSError: it could not be written; an earlier file of that name is untouched.
    """
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(redact(text))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_info(folder: Path) -> dict[str, Any] | None:
    """What a run directory's run.json says; None if there is none.

    Raises:
        ValueError: the file cannot be read, or is no JSON object.
    """
    path = folder / INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_WITHOUT}") from error
    if not isinstance(info, dict):
        raise ValueError(f"{path} is damaged (a {type(info).__name__}, not an object); {_WITHOUT}")
    return info


def read_record(folders: Sequence[Path], about: str) -> dict[str, Any] | None:
    """What the first of these run directories that has a run.json says about something, such as its decisions."""
    for folder in folders:
        if (info := read_info(folder)) is not None:
            found = info.get(about)
            return found if isinstance(found, dict) else None
    return None


_WITHOUT = "delete it to go on without what it recorded: its decisions are then made anew"
