"""Capacities that a step may exceed: the device detects it; the host checks once per step, and repeats the step.

    capacity 512, most 1024       a step needs 700       its MoE outputs are NaN; grow(875), and the step is repeated

The trainer, which repeats steps, reads `needed` (`carpool.train.steps.capacity`). Others call `Transport.check`, which
raises.
"""

from __future__ import annotations

import math
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

# Headroom over the need of past steps: after an overflow, and when a capacity shrinks.
GROWN, SHRUNK = 1.25, 1.125
# The smallest relative reduction for which a capacity shrinks.
WORTH = 0.1
FIRST_WINDOW = 2


class TokenCapacity(Protocol):
    """The number of tokens that can be received from one other rank, or sent to one other node. All layers of a process
    group share it.

    Attributes:
        capacity: tokens.
        most: tokens that suffice for any routing.
        needed: (1,) integer on the device: the largest number that was needed since the last change.
    """

    capacity: int
    most: int

    @property
    def needed(self) -> torch.Tensor: ...

    def grow(self, capacity: int) -> None:
        """Set the capacity. Between steps, with the same value on all ranks."""
        ...

    def overflowed(self) -> torch.Tensor:
        """Whether the capacity has been exceeded: a bool on the device, without a synchronisation."""
        ...


class NodeCapacity:
    """The number of tokens that each rank sends to each other node, in `FixedSizeDedup`.

    Where overflowing steps are repeated, it follows the need of the steps: after 2, 4, 8, ... steps it shrinks to the
    largest need of these and an eighth, if that saves a tenth; after an overflow it grows to the need and a quarter.

    Args:
        most: tokens of the largest rank.
        capacity: tokens; None: `step_tokens`, or else `most`.
        step_tokens: tokens of the largest rank in a step, if overflowing steps are repeated. None: they are not.

    Attributes:
        agreed: the largest need of any rank at the host's last check.
        whole: tokens are counted instead; set for computations that cannot be repeated, or are smaller than a step.
    """

    def __init__(self, most: int, capacity: int | None = None, step_tokens: int | None = None) -> None:
        self.most, self._step_tokens = most, step_tokens
        self.capacity = capacity or step_tokens or most
        self.agreed, self.whole = 0, False
        self._needed: torch.Tensor | None = None
        self._looks, self._window = 0, FIRST_WINDOW

    @property
    def counted(self) -> bool:
        """Whether the need is counted on the device."""
        return not self.whole and (self._step_tokens is not None or self.capacity < self.most)

    @property
    def noted(self) -> bool:
        """Whether any need has been counted yet. The same on all ranks."""
        return self._needed is not None

    @property
    def needed(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32) if self._needed is None else self._needed

    def of_piece(self, pieces: int) -> int:
        """The capacity of one of `pieces` pieces of a ride."""
        return -(-self.capacity // pieces)

    def note(self, rows: torch.Tensor, pieces: int) -> torch.Tensor:
        """Record the need of a piece, a 0-dimensional tensor. Returns whether it exceeds the capacity, on the
        device."""
        if self._needed is None:
            # The tensor outlives this call, which may be in inference mode.
            with torch.inference_mode(False):
                self._needed = torch.zeros(1, dtype=torch.int32, device=rows.device)
        # The smallest capacity whose pieces have this size.
        needed = (rows - 1) * pieces + 1
        torch.maximum(self._needed, needed.to(torch.int32), out=self._needed)
        return needed > self.capacity

    def overflowed(self) -> torch.Tensor:
        return self.needed.max() > self.capacity

    def grow(self, capacity: int) -> None:
        self._set(capacity)

    def fit(self, needed: int) -> bool:
        """After a step with this largest need of all ranks: shrink the capacity, or not. Returns whether it did."""
        self._looks += 1
        if self._step_tokens is None or self._looks < self._window:
            return False
        capacity = min(self._step_tokens, max(1, math.ceil(SHRUNK * needed)))
        fewer = capacity <= (1 - WORTH) * self.capacity
        self._set(capacity if fewer else self.capacity)
        return fewer

    def _set(self, capacity: int) -> None:
        self.capacity, self._looks, self._window = min(capacity, self.most), 0, 2 * self._window
        if self._needed is not None:
            self._needed.zero_()


class PairCapacity:
    """The number of choices that a rank may serve in one ride, where spare slots keep ranks to a limit: what experts
    allocate then follows the mean, instead of all tokens of all ranks. Each plan says what is needed, before anything
    is computed; a ride that needs more computes nothing, and its outputs are NaN.

        4 ranks of 8192 tokens, K 8, limit 1.1     72,090 rows of the experts' products; any routing: 262,144

    Args:
        limit: the load of a rank, over the mean.

    Attributes:
        whole: rides have the size that suffices for any routing; set for computations that cannot be repeated.
    """

    def __init__(self, limit: float, device: torch.device) -> None:
        self.limit, self.capacity, self.most, self.whole = limit, 0, 0, False
        # It outlives the call, which may be in inference mode.
        with torch.inference_mode(False):
            self.needed = torch.zeros(1, dtype=torch.int32, device=device)

    def of_ride(self, mean: int, most: int) -> int:
        """The bound of a ride with at most so many choices for each rank on average, and for one rank. All layers have
        the largest bound of any."""
        self.capacity = max(self.capacity, math.ceil(self.limit * mean))
        self.most = max(self.most, most)
        return most if self.whole else min(most, self.capacity)

    def note(self, load_W: torch.Tensor) -> None:
        """Record the choices that a plan gives each rank."""
        if not self.whole:
            torch.maximum(self.needed, load_W.max().to(torch.int32), out=self.needed)

    def overflowed(self) -> torch.Tensor:
        return self.needed.max() > self.capacity

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        self.needed.zero_()


# By group, so that transports that are constructed again after experts moved continue with the same capacity. Entries
# are freed with their group.
_NODE_CAPACITIES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int | None, ...], NodeCapacity]] = (
    weakref.WeakKeyDictionary()
)


def node_capacity(
    group: dist.ProcessGroup | None, most: int, capacity: int | None = None, step_tokens: int | None = None
) -> NodeCapacity:
    """The capacity of a rail's group, constructed at the first call with these numbers."""
    if group is None:
        return NodeCapacity(most, capacity, step_tokens)
    made, key = _NODE_CAPACITIES.setdefault(group, {}), (most, capacity, step_tokens)
    if key not in made:
        made[key] = NodeCapacity(most, capacity, step_tokens)
    return made[key]
