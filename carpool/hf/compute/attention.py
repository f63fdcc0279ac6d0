"""Which kernels compute attention.

Models with sinks (gpt-oss) cannot take PyTorch's fused attention, and Transformers then writes the whole matrix of
scores to memory. Its `flex_attention` does not, and leaves out what a sliding window hides: a step of gpt-oss-20b's
layers takes it (`fused_attention`).

For all others: on Hopper and Blackwell GPUs cuDNN's kernels are faster than those that PyTorch takes by itself, forward
and backward. They are no approximation. Their backward is not bitwise repeatable, so a run that is to be takes
PyTorch's own choice. So does attention that cuDNN does not take (other dtypes, other masks).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
FLEX = "flex_attention"


def fused_attention(model: Any) -> str | None:
    """The attention of Transformers that is fused on GPUs, for a model that it would give one that is not; None: its
    default is.

    Args:
        model: of Transformers, or its class."""
    return FLEX if model._supports_flex_attn and not model._supports_sdpa else None


@contextmanager
def attention_of_any_length(model: Any) -> Iterator[None]:
    """Inside, a model that takes `flex_attention` computes attention as written down: token by token, flex attention
    would be compiled for each length anew."""
    text = model.config.get_text_config()
    before = text._attn_implementation
    if before == FLEX:
        text._attn_implementation = "eager"
    try:
        yield
    finally:
        text._attn_implementation = before


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, `scaled_dot_product_attention` takes cuDNN's kernels where they are faster and can be used."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    if torch.cuda.get_device_capability(device) < (9, 0) or torch.version.cuda is None:
        return nullcontext()
    inside: AbstractContextManager[None] = sdpa_kernel(_IN_ORDER, set_priority=True)
    return inside
