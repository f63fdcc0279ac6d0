"""Where there is no GPU, the tests run Triton's kernels in its interpreter, on the CPU.

Triton looks at TRITON_INTERPRET when a kernel is defined, so `tests/conftest.py` calls `choose_interpreter` before
anything imports Triton. No other test launches a kernel on the CPU, so the choice changes nothing for them.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version

import torch


def why_not() -> str | None:
    """Why the interpreter cannot be used here."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    if _major_minor(triton) < [3, 9] and _major_minor(version("numpy")) >= [2, 3]:
        return (
            f"Triton {triton}'s interpreter does not know how numpy {version('numpy')} reads one number of an array; "
            "Triton 3.9 does, or numpy before 2.3"
        )
    return None


def choose_interpreter() -> None:
    """Sets TRITON_INTERPRET, for this process and those that it starts, unless it is set already."""
    if not torch.cuda.is_available() and why_not() is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _major_minor(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
