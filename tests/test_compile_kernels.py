"""Triton kernels compiled for cards that are not there (`tools/compile_kernels.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")


ROOT = Path(__file__).resolve().parents[1]


def run(module: str, *options: str) -> str:
    """In a process of its own, for here Triton interprets, and tests/quick_launches.py replaces its driver."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False, timeout=880)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("sm_89", ["--few"]),
        *(pytest.param(target, [], marks=pytest.mark.slow) for target in ("sm_86", "sm_89", "sm_120")),
    ],
)
def test_every_kernel_fits_a_card_with_99_kib_of_shared_memory(target: str, options: list[str]) -> None:
    said = run("tools.compile_kernels", "--target", target, "--quick", *options)
    for kernel in ("up_kernels._up", "adapter_kernels._inner", "optim.kernel._adamw", "quantised_kernels._dequantise"):
        assert kernel in said


def test_quick_launches_are_tritons() -> None:
    assert run("tests.quick_launches").startswith("ok")
