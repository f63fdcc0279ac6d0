"""Whole non-expert parameters on GPUs: the losses of FSDP2, stored in either dtype, and no call that waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun
from tests.gpu.runs import DENSE, losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]


@pytest.mark.parametrize("name", DENSE)
def test_a_run_learns_what_it_learns_under_fsdp(tmp_path: Path, name: str) -> None:
    runs = {dense: losses(f"{dense} {name}", tmp_path / dense) for dense in ("fsdp", "zero1")}
    # bf16: gradients are rounded at other places.
    assert runs["zero1"] == pytest.approx(runs["fsdp"], rel=5e-3)


def test_steps_are_exact_and_nothing_waits() -> None:
    torchrun(2, "tests.gpu.dense_worker", "steps", seconds=180)
