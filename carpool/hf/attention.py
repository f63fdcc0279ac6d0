"""Which of PyTorch's kernels compute attention.

On Hopper and Blackwell GPUs cuDNN's are faster than those that PyTorch takes by itself, forward and backward. They are
no approximation. Their backward is not bitwise repeatable, so a run that is to be takes PyTorch's own choice. So does
attention that cuDNN does not take (other dtypes, other masks).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, `scaled_dot_product_attention` takes cuDNN's kernels where they are faster and can be used."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    if torch.cuda.get_device_capability(device) < (9, 0) or torch.version.cuda is None:
        return nullcontext()
    inside: AbstractContextManager[None] = sdpa_kernel(_IN_ORDER, set_priority=True)
    return inside
