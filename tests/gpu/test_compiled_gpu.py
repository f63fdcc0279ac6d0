"""Two ranks on GPUs: a run whose layers are compiled, against one whose layers are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import needs
from tests.gpu.runs import losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


@pytest.mark.parametrize("name", ["none", "chunks", "sharded, recomputed"])
def test_compiled_layers_learn_the_same(tmp_path: Path, name: str) -> None:
    want = losses(f"{name} eager", tmp_path / "eager")
    got = losses(f"{name} compiled", tmp_path / "compiled")
    # bf16: what is fused is rounded less often.
    assert got == pytest.approx(want, rel=5e-3)
