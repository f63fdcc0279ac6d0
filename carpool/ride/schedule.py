"""When each piece of a layer runs. A schedule orders a transport's verbs and the experts; it never changes what they
compute.

    none        the plain ride: one verb after the other, the backward's combine beside a weight gradient
    chunks      tokens ride in chunks; one chunk travels while the experts compute on another. With one chunk this is
                the plain ride (carpool/ride/chunks.py has both)
    two-batch   two micro-batches, or two halves of one, run half a layer apart, attention of one beside the ride of the
                other (`two_batch.py`); whoever calls the model starts them, as `carpool train` does. In a pipeline,
                the forward of one beside the backward of another (`forward_backward.py`)
    tiles       the experts begin on rows that have arrived, and their sums leave part by part, in one ride
                (`tiles.py`). Takes a transport that rides in parts. On a CPU, which has none, as many chunks

A ride is hidden only if its transport works beside the computation: `nvlink` has a stream of its own for that, and so
has NCCL. gloo on a CPU gives the same numbers and hides nothing. `orders.py` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from carpool.kernels import MAX_PARTS
from carpool.plugins.nearest import nearest

__all__ = ["MAX_CHUNKS", "NAMES", "Schedule"]

NAMES = ("none", "chunks", "two-batch", "tiles")
_CUT = ("chunks", "tiles")  # which have a number of chunks
MAX_CHUNKS = 64


@dataclass(frozen=True)
class Schedule:
    """See the module's docstring.

    Attributes:
        name: one of `NAMES`.
        chunks: of "chunks" and "tiles": in how many pieces tokens ride. All ranks of a group alike.
        backward_chunks: of "chunks": in how many they do in the backward. None: as many.

    Raises:
        ValueError: an unknown name, or a number of chunks that makes no sense for it.

    Example: Schedule("chunks", 4)
    """

    name: Literal["none", "chunks", "two-batch", "tiles"] = "none"
    chunks: int = 1
    backward_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            guess = nearest(str(self.name), NAMES)
            hint = f"; did you mean {guess}?" if guess else ""
            raise ValueError(f"schedule={self.name!r} is not known; use one of {', '.join(NAMES)}{hint}")
        if self.name not in _CUT and self.chunks != 1:
            raise ValueError(f"schedule={self.name!r} has one chunk, not {self.chunks}; use schedule='chunks'")
        most = MAX_PARTS if self.name == "tiles" else MAX_CHUNKS
        if not 1 <= self.chunks <= most:
            raise ValueError(f"chunks={self.chunks} must be 1..{most} with schedule={self.name!r}")
        if self.backward_chunks is None:
            return
        if self.name != "chunks":
            raise ValueError(f"backward_chunks={self.backward_chunks} is of schedule='chunks', not {self.name!r}")
        if self.backward_chunks < 1 or self.pieces > most:
            raise ValueError(
                f"backward_chunks={self.backward_chunks} must be positive, and its least common multiple with "
                f"chunks={self.chunks} at most {most}: experts compute on so many pieces"
            )

    @property
    def pieces(self) -> int:
        """In how many pieces experts compute: both numbers of chunks divide it (`chunks.py`)."""
        return math.lcm(self.chunks, self.backward_chunks or self.chunks)

    @property
    def rides_under_way(self) -> int:
        """The most dispatches that are without their combine at one time."""
        if self.name == "two-batch":
            return 2
        # The next chunk's dispatch is launched before this chunk's combine.
        together = self.pieces // min(self.chunks, self.backward_chunks or self.chunks)
        return 1 if self.name == "tiles" else min(self.pieces, 2 * together)

    def __str__(self) -> str:
        own = "" if self.backward_chunks is None else f",{self.backward_chunks}"
        return {"chunks": f"chunks={self.chunks}{own}", "tiles": f"tiles={self.chunks}"}.get(self.name, self.name)
