"""Expert tensor parallelism on GPUs: slices of experts against whole ones, in the layer and in the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=4", "training.logging_steps=1", "training.eval_steps=2", "training.save_pretrained=false",
    "training.sample_tokens=4", "training.save_steps=2", "parallelism.num_ranks=2",
]  # fmt: skip


def losses(output: Path, *overrides: str) -> dict[int, float]:
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def test_layers_in_slices_equal_the_reference() -> None:
    """Those cases of the parity matrix that two ranks can form, over NCCL and over nvlink."""
    out = torchrun(2, "tests.gpu.slices_worker", "parity", seconds=400)
    assert " 0 differ from the reference" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_slices_learns_what_whole_experts_learn(tmp_path: Path, dtype: str) -> None:
    whole = losses(tmp_path / "whole", "parallelism.ep_size=2", f"model.dtype={dtype}")
    cut = losses(tmp_path / "cut", "parallelism.ep_size=1", "parallelism.etp_size=2", f"model.dtype={dtype}")
    assert cut == pytest.approx(whole, rel=1e-3 if dtype == "float32" else 2e-2)
    # Whole experts go on from the checkpoint of slices.
    step = tmp_path / "cut" / "checkpoints" / "step-00000002"
    resumed = losses(
        tmp_path / "resumed",
        "parallelism.ep_size=2",
        f"model.dtype={dtype}",
        f"training.resume_from_checkpoint={step}",
    )
    later = {number: loss for number, loss in whole.items() if number > 2}
    assert resumed == pytest.approx(later, rel=1e-3 if dtype == "float32" else 2e-2)
