"""All kernels in Triton's interpreter: tests/interpreted, in a process of its own, beside the other tests.

The interpreter is chosen when Triton is imported, hence the process. It is slow and takes one core, so it is started
when the tests are (`conftest.py`), and this file, which comes last, waits for it.
"""

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


class Interpreted:
    """pytest on the folder, with just this much more in the environment."""

    def __init__(self, **environment: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER]
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=inherited | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def wait(self) -> tuple[int, str]:
        """(exit status, the end of the output)."""
        output, _ = self._process.communicate()
        return self._process.returncode, output[-10000:]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def why_not() -> str | None:
    """Why the interpreter cannot be used here."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    numbers = [int(n) for n in re.findall(r"\d+", triton.__version__)[:2]]
    if numbers < [3, 9] and [int(n) for n in np.__version__.split(".")[:2]] >= [2, 3]:
        return (
            f"Triton {triton.__version__}'s interpreter does not know how numpy {np.__version__} reads one number of "
            "an array; Triton 3.9 does, or numpy before 2.3"
        )
    return None


@pytest.mark.timeout(900)
def test_kernels_equal_what_they_define(interpreted: Interpreted | None) -> None:
    if interpreted is None:
        pytest.skip(why_not() or "")
    status, output = interpreted.wait()
    assert status == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 250, output
    assert "skipped" not in output and "deselected" not in output, output


def test_without_the_interpreter_all_of_them_are_skipped() -> None:
    status, output = Interpreted().wait()
    assert status == 5 and "passed" not in output and "TRITON_INTERPRET=1" in output, output  # 5: nothing was run
