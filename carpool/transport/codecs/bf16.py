"""Rows of float32 travel as bfloat16: half the bytes. LOSSY for these; rows of 16 bits stay as they are."""

from __future__ import annotations

import torch

from carpool.transport.codecs.base import Codec

BYTES = 2


class BF16(Codec):
    """See the module's docstring."""

    name = "bf16"
    lossy = "as bfloat16"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return hidden * min(BYTES, element_size)

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return x_NH.bfloat16() if x_NH.element_size() > BYTES else x_NH

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return coded.to(dtype)
