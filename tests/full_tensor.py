"""Whole tensors on every rank, also of experts that FSDP has divided once more."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from carpool.train.checkpoints.state_tensors import as_rectangles


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    rectangle = as_rectangles({"": tensor})[""]
    assert isinstance(rectangle, DTensor)
    if rectangle.dtype == torch.int16:  # which neither gloo nor NCCL knows
        return rectangle.int().full_tensor().short()  # type: ignore[attr-defined, no-any-return]
    return rectangle.full_tensor()
