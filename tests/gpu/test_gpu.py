"""On GPUs: ordered sums on one, the parity matrix over NCCL on four."""

from __future__ import annotations

import pytest
import torch

from carpool.kernels.device import ordered_sum
from tests.gpu.ranks import needs, torchrun

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(37, 199, 11), (5000, 2048, 900), (0, 64, 3), (9, 8, 1)])
def test_ordered_sum_is_the_cpus_bit_by_bit(dtype: torch.dtype, rows: int, columns: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    index = torch.randint(outputs, (rows,), generator=generator)
    got = ordered_sum(values.cuda(), index.cuda(), outputs + 2)
    assert torch.equal(got.cpu(), ordered_sum(values, index, outputs + 2))
    weight = torch.rand(rows, generator=generator)
    got = ordered_sum(values.cuda(), index.cuda(), outputs + 2, weight.cuda())
    # A multiplication and an addition may be one rounding on the GPU and two on the CPU.
    torch.testing.assert_close(got.cpu(), ordered_sum(values, index, outputs + 2, weight), rtol=1e-5, atol=1e-5)


@needs(4)
@pytest.mark.timeout(560)
def test_parity_matrix_over_nccl() -> None:
    out = torchrun(4, "tests.gpu.worker", seconds=520)
    assert " 0 differ from the reference, 0 differ between two runs" in out
