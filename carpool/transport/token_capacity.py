"""Places for rows where there may be too few: the device notices, the host looks once per step and repeats it.

    capacity 512, most 1024       a step needs 700       its sums are NaN; grow(875), and the step again

Whoever repeats steps looks at `needed` (`carpool.train.steps.capacity`). Others call `Transport.check`, which raises.
"""

from __future__ import annotations

import math
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

# Of rows that a step needed: what is kept free for the next ones, after too few and after too many.
GROWN, SHRUNK = 1.25, 1.125
# The least share of the rows that must be saved to change their number.
WORTH = 0.1
FIRST_WINDOW = 2


class TokenCapacity(Protocol):
    """Places for rows of one other rank, or node, shared by all layers of a process group.

    Attributes:
        capacity: places.
        most: that suffice in any case.
        needed: (1,) integer on the device: the largest number that was needed since the last change.
    """

    capacity: int
    most: int

    @property
    def needed(self) -> torch.Tensor: ...

    def grow(self, capacity: int) -> None:
        """Have so many places. Between steps, all ranks alike."""
        ...

    def overflowed(self) -> torch.Tensor:
        """Whether rows had no place so far: a bool on the device. Nothing waits for it."""
        ...


class NodeCapacity:
    """How many rows each rank sends to each other node, in `FixedSizeDedup`.

    Where steps are repeated, the number follows what they need: after 2, 4, 8, ... steps it becomes an eighth more than
    the most of these, if that saves a tenth; and a quarter more than was needed after too few.

    Args:
        most: tokens of the largest rank.
        capacity: rows; None: as many as there are tokens.
        step_tokens: tokens of the largest rank in a step, for who repeats steps. None: nobody does.

    Attributes:
        agreed: of all ranks, what was needed when the host last looked.
        whole: set by who cannot repeat what it computes: there is a row for each token.
    """

    def __init__(self, most: int, capacity: int | None = None, step_tokens: int | None = None) -> None:
        self.most, self._step_tokens = most, step_tokens
        self.capacity = capacity or step_tokens or most
        self.agreed, self.whole = 0, False
        self._needed: torch.Tensor | None = None
        self._looks, self._window = 0, FIRST_WINDOW

    @property
    def counted(self) -> bool:
        """Whether rows are counted on the device."""
        return not self.whole and (self._step_tokens is not None or self.capacity < self.most)

    @property
    def noted(self) -> bool:
        """Whether any rows have been counted yet: on all ranks, or on none."""
        return self._needed is not None

    @property
    def needed(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32) if self._needed is None else self._needed

    def of_piece(self, pieces: int) -> int:
        """Rows of one of so many pieces of a ride."""
        return -(-(self.most if self.whole else self.capacity) // pieces)

    def note(self, rows: torch.Tensor, pieces: int) -> torch.Tensor:
        """Note that a piece needs so many rows, 0-dimensional. Returns whether it has too few, on the device."""
        if self._needed is None:
            # It outlives the call, which may be in inference mode.
            with torch.inference_mode(False):
                self._needed = torch.zeros(1, dtype=torch.int32, device=rows.device)
        # The least capacity whose pieces are as large.
        needed = (rows - 1) * pieces + 1
        torch.maximum(self._needed, needed.to(torch.int32), out=self._needed)
        return needed > self.capacity

    def overflowed(self) -> torch.Tensor:
        return self.needed.max() > self.capacity

    def grow(self, capacity: int) -> None:
        self._set(capacity)

    def fit(self, needed: int) -> bool:
        """Whether there are fewer rows from now on, after a step of which all ranks needed so many at most."""
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


# Facts of a group: transports that are made anew, because experts moved, go on with the same. They go when it goes.
_NODE_CAPACITIES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int | None, ...], NodeCapacity]] = (
    weakref.WeakKeyDictionary()
)


def node_capacity(
    group: dist.ProcessGroup | None, most: int, capacity: int | None = None, step_tokens: int | None = None
) -> NodeCapacity:
    """That of a rail's group, made at the first call with these numbers."""
    if group is None:
        return NodeCapacity(most, capacity, step_tokens)
    made, key = _NODE_CAPACITIES.setdefault(group, {}), (most, capacity, step_tokens)
    if key not in made:
        made[key] = NodeCapacity(most, capacity, step_tokens)
    return made[key]
