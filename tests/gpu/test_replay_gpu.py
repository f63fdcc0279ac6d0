"""Choices of a server's rollout, replayed on a GPU: those of the CPU, and its logits."""

from __future__ import annotations

import pytest
import torch

from tests.hf.test_replay import ON_A_DEVICE, check_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("dtype", "bound"), ON_A_DEVICE)
def test_the_same_choices_and_logits_as_on_the_cpu(dtype: torch.dtype, bound: float) -> None:
    check_on("cuda", dtype, bound)
