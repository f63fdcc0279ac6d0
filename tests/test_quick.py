"""Quick launches are Triton's launches: the same compiled kernel with the same arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_quick_launches_are_tritons() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_launches"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr
