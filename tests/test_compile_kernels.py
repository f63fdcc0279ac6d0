"""Triton kernels compiled for cards that are not there (`tools/compile_kernels.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")


@pytest.mark.parametrize(
    "target", ["sm_89", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sm_86", "sm_120"))]
)
def test_every_kernel_fits_a_card_with_99_kib_of_shared_memory(target: str) -> None:
    """In a process of its own, for here Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.compile_kernels", "--target", target, "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=880)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    for kernel in ("up_kernels._up", "adapter_kernels._inner", "optim.kernel._adamw", "quantised_kernels._dequantise"):
        assert kernel in ended.stdout


ROOT = Path(__file__).resolve().parents[1]


def test_quick_launches_are_tritons() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_launches"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr
