"""The kernel of the cross-entropy in Triton's interpreter, on the CPU, against plain PyTorch.

tests/conftest.py chooses the interpreter where there is no GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from carpool.kernels.cross_entropy import IGNORED, cross_entropy_

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True)

from carpool.kernels import cross_entropy_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(13, 7), (5, 1000), (3, 64), (4, 129), (2, 1), (0, 9)])
def test_the_kernel_equals_what_defines_it(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy_kernel, "BLOCK", 64)  # loops run several times
    generator = torch.Generator().manual_seed(rows)
    logits = (5 * torch.randn(rows, columns, generator=generator)).to(dtype)
    target = torch.randint(columns, (rows,), generator=generator)
    target[1::3] = IGNORED
    for gradient in (False, True):
        plain, own = logits.clone(), logits.clone()
        expected, loss = cross_entropy_(plain, target, gradient), torch.full((rows,), torch.nan)
        cross_entropy_kernel.launch(own, target, loss, IGNORED, gradient)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        assert (loss[1::3] == 0).all()
        if gradient:
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(own, plain, rtol=2 * unit, atol=1e-6)
        else:
            assert torch.equal(own, logits)


def test_infinity_and_what_is_no_number() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, 1.0, 2.0], [1.0, inf, 2.0], [nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    expected, loss = cross_entropy_(logits.clone(), torch.tensor([1, 0, 1, 2]), False), torch.zeros(4)
    cross_entropy_kernel.launch(logits, torch.tensor([1, 0, 1, 2]), loss, IGNORED, True)
    torch.testing.assert_close(loss[[0, 3]], expected[[0, 3]])
    assert not loss[1:3].isfinite().any() and not expected[1:3].isfinite().any()
    cross_entropy_kernel.launch(torch.zeros(2, 3), torch.tensor([3, -1]), loss[:2], IGNORED, False)
    assert loss[:2].isnan().all()
