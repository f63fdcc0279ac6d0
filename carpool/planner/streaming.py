"""When the optimizer's state in host memory costs nothing: the tokens of a step from which its copies are hidden.

Each step brings the state of every parameter into the device and takes it out again. That takes the same time whatever
the batch is, and the time to compute grows with the tokens. So there is a number of tokens from which the copies fit
beside what computes:

    30.5 B parameters on one H200, 8-bit moments and low bits: 4.03 bytes each
    copies     123 GB in and 123 GB out at 45 GB/s                            5.4 s
    backward   2/3 of 6 * 3.3 B operations a token at 500 TFLOP/s             27 us a token
    together   5.4 s / 27 us                                                  205,000 tokens of a rank and step

What computes beside the copies depends on when updates may begin (`BESIDE`). Clipping by the norm of this step's
gradient waits for the whole backward, so that nothing is left to hide behind.

All of it is modelled. Copies in and out are counted one after the other; a link that carries both directions at once
needs less. Experts are taken to compute at the rate of their matrix products; what else a layer does hides more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from carpool.planner.hardware import Hardware

# The share of a step's operations that is computed while copies are under way, by when a parameter is updated.
BESIDE: Mapping[str, float] = MappingProxyType({
    "after the norm": 0.0,  # the whole backward is done
    "in the backward": 2 / 3,  # as soon as its gradient is there
})  # fmt: skip


def stream_seconds(state_bytes: float, hardware: Hardware) -> float:
    """How long the copies of one step take.

    Args:
        state_bytes: of one rank's state in host memory.
        hardware: whose `host_link` they take.
    """
    return 2 * state_bytes / hardware.host_link.bytes_per_second


def break_even_tokens(state_bytes: float, flops_per_token: float, hardware: Hardware, beside: str) -> float:
    """The tokens of a rank and step from which streaming the optimizer's state costs nothing.

    Args:
        state_bytes: of one rank's state in host memory.
        flops_per_token: of one token, forward and backward.
        beside: a key of `BESIDE`.

    Returns:
        Tokens; infinite where nothing is computed beside the copies.

    Raises:
        ValueError: `beside` is no key of `BESIDE`.
    """
    if beside not in BESIDE:
        raise ValueError(f"beside = {beside!r} is not known; it is one of {', '.join(map(repr, BESIDE))}")
    if not BESIDE[beside]:
        return math.inf if state_bytes else 0.0
    return stream_seconds(state_bytes, hardware) * hardware.flops / (BESIDE[beside] * flops_per_token)
