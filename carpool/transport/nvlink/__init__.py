"""Rows written straight into the memory of other GPUs, over NVLink, by Triton kernels.

`transport.py` follows a row through the verbs, along the ways that `route.py` holds; `runner.py` says on which stream a
verb runs, `rows.py` what becomes of rows that arrived; `options.py` what one may choose, and `usable.py` whether a
group can use it at all. `buffers.py` owns the memory; `signals.py` is how ranks wait for each other; one file per
kernel: `plan_kernel.py`, `choices_kernel.py`, `dispatch_kernel.py`, `combine_kernel.py`, and `launch.py` launches them;
`keep_kernel.py` copies rows that are kept.
"""

from __future__ import annotations

from carpool.transport.nvlink.buffers import Buffers, buffers_of
from carpool.transport.nvlink.options import NVLinkOptions
from carpool.transport.nvlink.transport import NVLink
from carpool.transport.nvlink.usable import why_not

__all__ = [
    "Buffers",
    "NVLink",
    "NVLinkOptions",
    "buffers_of",
    "why_not",
]
