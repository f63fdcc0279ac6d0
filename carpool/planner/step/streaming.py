"""When the optimizer's state in host memory costs nothing: the tokens of a step from which its copies are hidden.

Each step brings the state of every parameter into the device and takes it out again. That takes the same time whatever
the batch is, and the time to compute grows with the tokens. So there is a number of tokens from which the copies fit
beside what computes:

    30.5 B parameters on one H200, 8-bit moments and low bits: 4.03 bytes each
    copies     123 GB in, 123 GB out meanwhile, each way at 41 GB/s           3.0 s
    backward   2/3 of 6 * 3.3 B operations a token at 500 TFLOP/s             27 us a token
    together   3.0 s / 27 us                                                  114,000 tokens of a rank and step

What computes beside the copies depends on when updates may begin (`BESIDE`). Clipping by the norm of this step's
gradient waits for the whole backward, so that nothing is left to hide behind.

All of it is modelled but for the share of a link's rate that each direction has while both are busy (`BOTH_WAYS`).
Experts are taken to compute at the rate of their matrix products; what else a layer does hides more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from carpool.planner.machine.hardware import Hardware

# The share of a step's operations that is computed while copies are under way, by when a parameter is updated.
BESIDE: Mapping[str, float] = MappingProxyType({
    "after the norm": 0.0,  # the whole backward is done
    "in the backward": 2 / 3,  # as soon as its gradient is there
})  # fmt: skip

# 41 of 45 GB/s each way: 8 B parameters' state in a training step on an H200 (docs/measurements/streaming.json).
BOTH_WAYS = 0.9


def stream_seconds(state_bytes: float, hardware: Hardware) -> float:
    """How long the copies of one step take, in and out at the same time.

    Args:
        state_bytes: of one rank's state in host memory.
        hardware: whose `host_link` they take.
    """
    return state_bytes / (BOTH_WAYS * hardware.host_link.bytes_per_second)


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
