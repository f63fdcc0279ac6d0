"""Writing a page: at once, so that nobody sees half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def check_output(output: Path, what: str) -> None:
    """Raise ValueError if a page cannot be written there. `what`: "report", "page"."""
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a folder" if output.is_dir() else f"cannot be written: the folder {output.parent} does not exist"
        raise ValueError(f"{output} {problem}; name a file to write the {what} to")


def write_page(page: str, output: Path, what: str) -> None:
    """Replace the file at once. Raises ValueError if it cannot be written."""
    draft = output.with_name(f".{output.name}.part")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ValueError(f"{output} cannot be written ({error.strerror}); name another file for the {what}") from error
