"""Expert tensor parallelism on GPUs: slices of experts against whole ones, in the layer and in the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun
from tests.gpu.runs import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


def losses_of_steps(name: str, output: Path, *of_the_test: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in train(name, output, *of_the_test) if line["kind"] == "train"}


def test_layers_in_slices_equal_the_reference() -> None:
    """Those cases of the parity matrix that two ranks can form, over NCCL and over nvlink."""
    out = torchrun(2, "tests.gpu.slices_worker", "parity", seconds=400)
    assert " 0 differ from the reference" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_slices_learns_what_whole_experts_learn(tmp_path: Path, dtype: str) -> None:
    whole = losses_of_steps(f"whole experts {dtype}", tmp_path / "whole")
    cut = losses_of_steps(f"slices of experts {dtype}", tmp_path / "cut")
    assert cut == pytest.approx(whole, rel=1e-3 if dtype == "float32" else 2e-2)
    # Whole experts go on from the checkpoint of slices.
    step = tmp_path / "cut" / "checkpoints" / "step-00000002"
    resumed = losses_of_steps(f"whole experts {dtype}", tmp_path / "resumed", f"training.resume_from_checkpoint={step}")
    later = {number: loss for number, loss in whole.items() if number > 2}
    assert resumed == pytest.approx(later, rel=1e-3 if dtype == "float32" else 2e-2)
