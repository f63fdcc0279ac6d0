"""Spare slots over `nvlink` on real GPUs: tests/gpu/spare_slots_worker.py on every one of them, up to four, or four on
one. test_graphs_gpu.py has whole runs, captured and not."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import RANKS, needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(360), needs(2)]


@pytest.mark.parametrize("mode", ["collectives", "graph", "leases"])
def test_spare_slots(mode: str) -> None:
    out = torchrun(RANKS, "tests.gpu.spare_slots_worker", mode, seconds=300)
    lines = [line for line in out.splitlines() if line.startswith(f"{mode}: ")]
    assert len(lines) == 1 and lines[0].endswith(", ok"), out
