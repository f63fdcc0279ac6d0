"""When each piece of a layer runs. A schedule orders a transport's verbs and the experts; it never changes what they
compute.

    none        the plain ride: everything in turn, on the computation's stream
    chunks      tokens ride in chunks, one beside the experts' work on another (`chunks.py`). With one chunk, only the
                backward's combine has something beside it: a weight gradient
    two-batch   two halves of a micro-batch run half a layer apart, attention of one beside the ride of the other
                (`two_batch.py`); whoever calls the model lets them, as `carpool train` does
    tiles       the experts begin on rows that have arrived, and their sums leave part by part, in one ride
                (`tiles.py`). Over `nvlink`; on a CPU, where it hides nothing, as many chunks

A ride hides only if its transport works beside the computation: `nvlink` on a stream of its own, NCCL on its own
anyway; gloo on a CPU gives the same numbers and hides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from carpool.transport import NVLinkOptions
from carpool.transport.nvlink.buffers import MAX_PARTS

__all__ = ["MAX_CHUNKS", "NAMES", "Schedule"]

NAMES = ("none", "chunks", "two-batch", "tiles")
PIECES = ("chunks", "tiles")
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
            raise ValueError(f"schedule={self.name!r} is not known; use one of {', '.join(NAMES)}")
        if self.name not in PIECES and self.chunks != 1:
            raise ValueError(f"schedule={self.name!r} has one chunk, not {self.chunks}; use schedule='chunks'")
        most = MAX_PARTS if self.name == "tiles" else MAX_CHUNKS
        if not 1 <= self.chunks <= most:
            raise ValueError(f"chunks={self.chunks} must be 1..{most} with schedule={self.name!r}")
        if self.backward_chunks is None:
            return
        if self.name != "chunks":
            raise ValueError(f"backward_chunks={self.backward_chunks} is of schedule='chunks', not {self.name!r}")
        if self.backward_chunks < 1 or self.parts > most:
            raise ValueError(
                f"backward_chunks={self.backward_chunks} must be positive, and its least common multiple with "
                f"chunks={self.chunks} at most {most}: experts compute on so many parts"
            )

    @property
    def parts(self) -> int:
        """In how many parts experts compute: what chunks of forward and backward consist of."""
        return math.lcm(self.chunks, self.backward_chunks or self.chunks)

    def __str__(self) -> str:
        own = "" if self.backward_chunks is None else f",{self.backward_chunks}"
        return {"chunks": f"chunks={self.chunks}{own}", "tiles": f"tiles={self.chunks}"}.get(self.name, self.name)

    def options(self, options: NVLinkOptions | None) -> NVLinkOptions:
        """What was asked for, with what `nvlink` needs for this: a stream of its own, and buffers for a chunk.

        Raises:
            ValueError: tiles, and rows that travel as FP8."""
        options = options or NVLinkOptions()
        if self.name == "none":
            return options
        if self.name == "tiles":
            return replace(options, side_stream=True, parts=self.chunks)
        most = None if options.max_tokens is None else -(-options.max_tokens // self.parts)
        capacity = None if options.capacity is None else min(options.capacity, most or options.capacity)
        # A chunk's dispatch is under way while the one before it is not combined yet; each of its parts has a lease,
        # and another one if rows are sent again.
        together = self.parts // min(self.chunks, self.backward_chunks or self.chunks)
        beside = 2 if self.name == "two-batch" else min(self.parts, 2 * together)
        leases = max(options.num_leases, beside * (2 if options.keep == "again" else 1))
        return replace(options, side_stream=True, max_tokens=most, capacity=capacity, num_leases=leases)
