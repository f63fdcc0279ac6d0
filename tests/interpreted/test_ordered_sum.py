"""The kernel of `ordered_sum` in Triton's interpreter: equal to the plain version bit for bit.

tests/conftest.py chooses the interpreter where there is no GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from carpool.kernels.device import ordered_lists, ordered_sum

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True)

from carpool.kernels.ordered_sum_kernel import launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("n", "width", "rows"), [(37, 5, 7), (23, 1030, 1), (0, 4, 3), (9, 33, 25)])
def test_the_kernel_equals_what_defines_it(n: int, width: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, width, generator=generator).to(dtype)
    index = torch.randint(0, rows, (n,), generator=generator)
    for factor in (None, torch.rand(n, generator=generator)):
        expected = ordered_sum(values, index, rows, factor)
        out = torch.full_like(expected, torch.nan)
        launch(values, *ordered_lists(index, rows), factor, out)
        assert torch.equal(out, expected)
