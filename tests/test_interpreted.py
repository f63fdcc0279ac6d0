"""All kernels in Triton's interpreter: tests/interpreted, in a process of its own, beside the other tests.

The interpreter is chosen when Triton is imported, hence the process. It is slow and takes one core, so it is started
when the tests are (`conftest.py`), and this file, which comes last, waits for it.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests/interpreted"


class Interpreted:
    """pytest on the folder, in the interpreter."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
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


@pytest.mark.parametrize("file", sorted((ROOT / FOLDER).glob("test_*.py")), ids=lambda file: file.stem)
def test_without_the_interpreter_all_of_them_are_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(pytest.skip.Exception, match="TRITON_INTERPRET=1"):
        runpy.run_path(str(file))
