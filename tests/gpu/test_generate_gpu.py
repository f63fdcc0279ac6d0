"""Generation on GPUs: decode steps in CUDA graphs over ranks, and eagerly on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.generate_worker import SIZES, one_gpu
from tests.gpu.ranks import RANKS, needs, torchrun
from tests.serve.checkpoints import save

pytestmark = pytest.mark.gpu


def test_on_one_gpu(tmp_path: Path) -> None:
    """Products in full float32, or another way to sum may choose another token."""
    assert torch.get_float32_matmul_precision() == "highest"
    right, text = one_gpu(str(tmp_path))
    assert right, text


@needs(2)
def test_over_ranks(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe", **SIZES)
    assert "graphs: yes" in torchrun(RANKS, "tests.gpu.generate_worker", "over_ranks", str(tmp_path), seconds=240)
