"""Triton kernels that write tokens directly into the memory of other GPUs over NVLink.

`transport.py` explains the verbs and their streams; `route.py` holds the destinations of tokens, and reads and saves
those that arrived; `options.py` has the options, and whether a group can use the transport. `buffers.py` owns the
memory; `signals.py` is how ranks wait for each other; `plan_kernel.py`, `dispatch_kernel.py` and `combine_kernel.py`
are the kernels, which `launch.py` launches; `keep_kernel.py` copies tokens that are saved. `peer_slots.py` and
`peer_slots_kernel.py` bring replicas to spare slots.
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
