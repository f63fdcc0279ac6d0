"""Two hops on real GPUs: tests/gpu/hierarchical_worker.py on four ranks, on four GPUs or sharing one."""

from __future__ import annotations

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]


@needs(4)
@pytest.mark.parametrize("mode", ["parity", "sync", "rows", "slots", "sequences"])
def test_two_nodes_of_two_ranks(mode: str) -> None:
    out = torchrun(4, "tests.gpu.hierarchical_worker", mode, seconds=400)
    lines = [line for line in out.splitlines() if line.startswith(f"{mode}: ")]
    assert len(lines) == 1 and lines[0].endswith(", ok"), out
