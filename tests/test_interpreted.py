"""The kernels of the `nvlink` transport, in Triton's interpreter: runs tests/interpreted in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests/interpreted"


def run(environment: dict[str, str]) -> tuple[int, str]:
    """(exit status, output) of pytest on the folder, with just this much more in the environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout[-8000:] + done.stderr[-2000:]


def version(text: str) -> tuple[int, ...]:
    """The leading numbers: "3.6.0+git1" -> (3, 6)."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


def test_the_transports_kernels_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    if version(triton.__version__) < (3, 9) and version(np.__version__) >= (2, 3):
        pytest.skip(
            f"Triton {triton.__version__}'s interpreter does not know how numpy {np.__version__} reads one number of "
            "an array; Triton 3.9 does, or numpy before 2.3"
        )
    status, output = run({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert status == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 50, output
    assert "skipped" not in output and "deselected" not in output, output


def test_without_the_interpreter_all_of_them_are_skipped() -> None:
    status, output = run({})
    assert status == 5 and "passed" not in output and "TRITON_INTERPRET=1" in output, output  # 5: nothing was run
