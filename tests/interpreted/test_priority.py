"""The kernel that looks whether a ride has the links, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; tests/conftest.py sets it where there is no GPU", allow_module_level=True)

from carpool.schedule.priority_kernel import launch


def test_it_waits_while_they_are_taken_and_not_for_ever() -> None:
    looked = torch.tensor([1, 3], dtype=torch.int32)
    launch(looked, patience=5)
    assert looked.tolist() == [1, 8]


def test_it_does_not_wait_when_they_are_free() -> None:
    looked = torch.tensor([0, 3], dtype=torch.int32)
    launch(looked)
    assert looked.tolist() == [0, 3]
