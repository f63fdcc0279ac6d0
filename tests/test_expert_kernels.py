"""The experts' kernels, in Triton's interpreter: see the files named below."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize("file", ["experts_interpreted.py", "experts_gemm_interpreted.py"])
def test_kernels_equal_plain_pytorch_in_the_interpreter(file: str) -> None:
    triton = pytest.importorskip("triton")
    if triton.__version__ < "3.7" and np.__version__ >= "2.3":
        pytest.skip("the interpreter of Triton before 3.7 does not know how numpy 2.3 reads one number of an array")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
