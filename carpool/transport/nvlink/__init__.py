"""Rows written straight into the memory of other GPUs, over NVLink, by Triton kernels.

`transport.py` follows a row through the verbs; `buffers.py` owns the memory; `signals.py` is how ranks wait for each
other; one file per kernel: `plan_kernel.py`, `dispatch_kernel.py`, `combine_kernel.py`.
"""

from __future__ import annotations

from carpool.transport.nvlink.buffers import BufferOverflowError, Buffers, RankMissingError, buffers_of
from carpool.transport.nvlink.transport import NVLink, NVLinkOptions, why_not

__all__ = [
    "BufferOverflowError",
    "Buffers",
    "NVLink",
    "NVLinkOptions",
    "RankMissingError",
    "buffers_of",
    "why_not",
]
