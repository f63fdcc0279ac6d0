"""Two ranks on GPUs: the host waits for the device once in a step, and for the room of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun
from tests.gpu.waits_worker import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs(2)]
SETTINGS = [
    f"training.max_steps={STEPS}", "training.eval_steps=none", "training.eval_on_start=false",
    "training.save_steps=none", "training.gradient_accumulation_steps=2", "parallelism.num_ranks=2",
]  # fmt: skip


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_step_waits_once(tmp_path: Path, compiled: str) -> None:
    settings = [*SETTINGS, "moe.transport=nvlink", f"training.torch_compile={compiled}"]
    torchrun(2, "tests.gpu.waits_worker", "waits", str(tmp_path / "run"), *settings, seconds=240)
