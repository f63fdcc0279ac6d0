"""Two ranks on GPUs: the host waits for the device once in a step, and for the room of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun
from tests.gpu.runs import RUNS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs(2)]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_step_waits_once(tmp_path: Path, compiled: str) -> None:
    settings = RUNS[f"waits compiled {compiled}"].arguments(tmp_path)
    torchrun(2, "tests.gpu.waits_worker", "waits", str(tmp_path / "run"), *settings, seconds=240)
