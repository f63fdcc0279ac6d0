"""Are the kernels of tests/interpreted run at all?

Without a GPU this session runs them, like any other file. With a GPU this session compiles kernels, so that folder runs
in a process of its own, which chooses the interpreter.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import why_not

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "interpreted"


@pytest.mark.timeout(900)
def test_kernels_equal_what_they_define() -> None:
    if reason := why_not():
        pytest.skip(reason)
    import triton

    if os.environ.get("TRITON_INTERPRET") == "1":
        assert triton.knobs.runtime.interpret, "Triton was imported before tests/conftest.py chose its interpreter"
        return
    # It is a session by itself, not another worker of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
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


def test_without_the_interpreter_all_of_them_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    make_module = runpy.run_path(str(FOLDER / "conftest.py"))["pytest_pycollect_makemodule"]
    with pytest.raises(pytest.skip.Exception, match="TRITON_INTERPRET=1"):
        make_module(FOLDER / "test_ride.py")
