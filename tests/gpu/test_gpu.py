"""On GPUs: ordered sums and grouped experts on one, the parity matrix over NCCL on four."""

from __future__ import annotations

import pytest
import torch

from carpool.experts import ExpertFunction, ExpertWeights, GroupedExperts, make_activation, reference_experts
from carpool.kernels.device import ordered_sum
from carpool.transport import Arrivals, HiddenStates
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 36])
def test_grouped_experts_against_the_reference(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(0)
    rows, slots, top_k, inner = 300, 6, 4, 40
    function = ExpertFunction(make_activation("silu", gated=True))
    weights = ExpertWeights(torch.randn(slots, 2 * inner, hidden) / 8, torch.randn(slots, hidden, inner) / 8)
    x, weight = torch.randn(rows, hidden), torch.rand(rows, top_k)
    slot = torch.rand(rows, slots).argsort(1)[:, :top_k].int()
    slot[slot == 3] = -1  # a slot that nobody wants
    exact = ExpertWeights._make(None if w is None else w.double() for w in weights)
    want = reference_experts(x.double(), slot, weight, exact, function)
    arrivals = Arrivals(HiddenStates.of(x.to(dtype).cuda()), slot.cuda(), weight.cuda(), int((slot >= 0).sum()))
    partial = torch.full((rows, hidden), torch.nan, dtype=dtype, device="cuda")
    on_gpu = ExpertWeights._make(None if w is None else w.to(dtype).cuda() for w in weights)
    GroupedExperts(function).forward(arrivals, on_gpu, partial)
    error = (partial.double().cpu() - want).abs().max() / want.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@needs(4)
@pytest.mark.timeout(560)
def test_parity_matrix_over_nccl() -> None:
    out = torchrun(4, "tests.gpu.worker", seconds=520)
    assert " 0 differ from the reference, 0 differ between two runs" in out
