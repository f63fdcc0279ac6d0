"""Where a tensor is computed on: by kernels, or by plain PyTorch."""

from __future__ import annotations

import importlib.util

import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute on this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None
