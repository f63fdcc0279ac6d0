"""Rows written straight into the memory of other GPUs, over NVLink, by Triton kernels.

`transport.py` follows a row through the verbs and says on which stream each runs; `route.py` holds where rows go, and
what becomes of those that arrived; `options.py` what one may choose, and whether a group can use it at all.
`buffers.py` owns the memory; `signals.py` is how ranks wait for each other; `plan_kernel.py`, `dispatch_kernel.py` and
`combine_kernel.py` are the kernels, which `launch.py` launches; `keep_kernel.py` copies rows that are saved.
"""

from __future__ import annotations

from carpool.transport.nvlink.buffers import Buffers, buffers_of
from carpool.transport.nvlink.options import NVLinkOptions, why_not
from carpool.transport.nvlink.transport import NVLink

__all__ = [
    "Buffers",
    "NVLink",
    "NVLinkOptions",
    "buffers_of",
    "why_not",
]
