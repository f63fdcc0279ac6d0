"""Two ranks on GPUs: a run whose layers are compiled, against one whose layers are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.sample_tokens=4", "parallelism.num_ranks=2",
]  # fmt: skip


def losses(output: Path, *overrides: str) -> list[float]:
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.parametrize("schedule", ["none", "chunks"])
def test_compiled_layers_learn_the_same(tmp_path: Path, schedule: str) -> None:
    want = losses(tmp_path / "eager", f"moe.schedule={schedule}")
    got = losses(tmp_path / "compiled", f"moe.schedule={schedule}", "training.torch_compile=true")
    # bf16: what is fused is rounded less often.
    assert got == pytest.approx(want, rel=5e-3)
