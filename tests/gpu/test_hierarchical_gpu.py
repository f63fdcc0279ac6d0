"""Two hops on real GPUs: tests/gpu/hierarchical_worker.py on four ranks, on four GPUs or sharing one."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import check_mode, needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]


@needs(4)
@pytest.mark.parametrize("mode", ["parity", "sync", "rows", "slots", "sequences"])
def test_two_nodes_of_two_ranks(mode: str) -> None:
    check_mode("tests.gpu.hierarchical_worker", mode, ranks=4)
