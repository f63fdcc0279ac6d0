"""Rows travel as e4m3 with a float32 scale for each 128 columns: about half the bytes of bfloat16. LOSSY.

    H 7168        7168 codes and 56 scales: 7392 bytes, instead of 14336 in bfloat16 or 28672 in float32

Codes and scales are one packet (`carpool.kernels.packets`), so a row and its scales travel together. An element is off
by up to 1/16 of itself.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3), which sends rows to experts so and sums back in bfloat16.
"""

from __future__ import annotations

import torch

from carpool.kernels.packets import packet_bytes, unpack
from carpool.kernels.packing import pack
from carpool.transport.codecs.base import Codec


class FP8(Codec):
    """See the module's docstring."""

    name = "fp8"
    lossy = "as FP8"

    def row_bytes(self, hidden: int, element_size: int) -> int:
        return packet_bytes(hidden)

    def encode(self, x_NH: torch.Tensor) -> torch.Tensor:
        return pack(x_NH)

    def decode(self, coded: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        if not coded.is_cuda:
            return unpack(coded, hidden).to(dtype)
        from carpool.kernels.packet_kernel import launch_dequantise  # Triton, which a CPU can do without

        rows = coded.shape[0]
        return launch_dequantise(
            coded, torch.full((1,), rows, dtype=torch.int32, device=coded.device), rows, hidden, dtype
        )
