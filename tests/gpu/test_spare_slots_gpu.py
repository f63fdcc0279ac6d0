"""Spare slots over `nvlink` on real GPUs: tests/gpu/spare_slots_worker.py on every one of them, up to four, or four on
one. test_graphs_gpu.py has whole runs, captured and not."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import check_mode, needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(360), needs(2)]


@pytest.mark.parametrize("mode", ["collectives", "graph", "leases"])
def test_spare_slots(mode: str) -> None:
    check_mode("tests.gpu.spare_slots_worker", mode, seconds=300)
