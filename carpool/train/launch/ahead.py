"""A look ahead: a function of the run is called in a process of its own before there are ranks.

    carpool train  --settings-->  this process: imports the model's code, asks the GPU  --an error, or nothing-->

The agent lives as long as the run. What the look ahead imports, and what it keeps of a GPU's memory, goes with its
process. The agent does meanwhile what else it has to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from carpool.train.config import Config
from carpool.train.launch.worker import die_with, find_entry, is_user_error, job_of, leave

# A look ahead takes seconds, or a minute where files come from afar.
_LIMIT_SECONDS = 300.0


@contextlib.contextmanager
def look_ahead(config: Config, entry: str, *, debug: bool = False, **kwargs: Any) -> Iterator[None]:
    """Calls `entry(config, **kwargs)`, "module:function", in a process of its own, beside what is done inside.

    Args:
        debug: The error's text is its traceback, and the process writes to the terminal.
        kwargs: Must be JSON.

    Raises:
        ValueError: at the end, what `entry` raised, if a user can put it right. Ranks meet any other error, too, and
            report it, as they do where the process does not answer in time.
    """
    job = {**job_of(config, entry, kwargs), "debug": debug}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {job['path']!r}; from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if debug else subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            json.dump(job, process.stdin)
            process.stdin.close()
        process.stdin = None  # or `communicate` would flush it
        try:
            yield
            refused, _ = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            # It stands still, or waits for a file or a GPU that does not answer.
            process.kill()
            refused = ""
            print(
                f"the settings could not be checked ahead: process {process.pid} did not answer for "
                f"{_LIMIT_SECONDS:.0f} s, and was ended; ranks start, and check them again",
                file=sys.stderr,
            )
        except BaseException:
            process.kill()
            raise
    if refused:
        raise ValueError(refused)


@contextlib.contextmanager
def said_if_slow(seconds: float = 10.0) -> Iterator[None]:
    """A line on standard error if what is inside takes longer."""
    text = "still looking at the settings and the shapes of the model, layer by layer; thousands of layers take minutes"
    timer = threading.Timer(seconds, print, (text,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> None:
    """Does one job, which is on standard input, and writes why it was refused to standard output."""
    job = json.load(sys.stdin)
    die_with(job["agent"])
    # What libraries print is no answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        find_entry(job["entry"])(Config.model_validate_json(json.dumps(job["config"])), **job["kwargs"])
    except Exception as error:
        if is_user_error(error) or isinstance(error, ImportError):
            os.write(answer, (traceback.format_exc() if job["debug"] else text_of(error)).encode())
    leave(0)


def text_of(error: BaseException) -> str:
    """An error that a user can put right, in words."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
