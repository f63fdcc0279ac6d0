"""All kernels in Triton's interpreter: tests/interpreted, in a process of its own.

The interpreter is chosen when Triton is imported, hence the process. It takes one core for longer than any other file
of tests, so `conftest.py` puts this file first, and `make test` runs the others beside it.
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
def test_kernels_equal_what_they_define() -> None:
    if reason := why_not():
        pytest.skip(reason)
    # It is a session by itself, not another worker of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER],
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = done.stdout[-10000:]
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 250, output
    assert "skipped" not in output and "deselected" not in output, output


@pytest.mark.parametrize("file", sorted((ROOT / FOLDER).glob("test_*.py")), ids=lambda file: file.stem)
def test_without_the_interpreter_all_of_them_are_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(pytest.skip.Exception, match="TRITON_INTERPRET=1"):
        runpy.run_path(str(file))
