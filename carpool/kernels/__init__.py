"""What the kernels of several packages share: launching, multiprocessor budgets, ordered sums, signals.

Here, without PyTorch, is what hosts and kernels agree upon: about signals, of which `signals.py` is the waiting itself,
and about packets (`packets.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_CTAS = 64  # programs of a verb
MAX_PARTS = 16  # of a ride

GROUP = 128  # columns of a packet that share a scale
FP8_MAX = 448.0  # the largest number that FP8 (e4m3) has


class Awaited(NamedTuple):
    """What a kernel that reads hidden states while they arrive waits with: the arguments of `signals.wait_part`.

    Attributes:
        flags: int32, the flags that the senders raise in this rank's memory.
        epochs: int32, how many rides of this memory have ended.
        status, host_status: int32, where a wait that failed is noted, on the device and on the host.
        timeout: nanoseconds.
        verb: the number of the verb in which a missing rank is missing.
        sources, each: how many ranks send, by how many programs.
    """

    flags: torch.Tensor
    epochs: torch.Tensor
    status: torch.Tensor
    host_status: torch.Tensor
    timeout: int
    verb: int
    sources: int
    each: int
