"""When each piece of a layer runs. A schedule orders a transport's verbs and the experts; it never changes what they
compute.

    none        the plain ride: everything in turn, on the computation's stream
    chunks      tokens ride in chunks, one beside the experts' work on another (`chunks.py`). With one chunk, only the
                backward's combine has something beside it: a weight gradient
    two-batch   two halves of a micro-batch run half a layer apart, attention of one beside the ride of the other
                (`two_batch.py`); whoever calls the model lets them, as `carpool train` does

A ride hides only if its transport works beside the computation: `nvlink` on a stream of its own, NCCL on its own
anyway; gloo on a CPU gives the same numbers and hides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from carpool.transport import NVLinkOptions

__all__ = ["MAX_CHUNKS", "NAMES", "Schedule"]

NAMES = ("none", "chunks", "two-batch")
MAX_CHUNKS = 64


@dataclass(frozen=True)
class Schedule:
    """See the module's docstring.

    Attributes:
        name: "none", "chunks" or "two-batch".
        chunks: of "chunks": how many. All ranks of a group alike.

    Raises:
        ValueError: an unknown name, or a number of chunks that makes no sense for it.

    Example: Schedule("chunks", 4)
    """

    name: Literal["none", "chunks", "two-batch"] = "none"
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"schedule={self.name!r} is not known; use one of {', '.join(NAMES)}")
        if self.name != "chunks" and self.chunks != 1:
            raise ValueError(f"schedule={self.name!r} has one chunk, not {self.chunks}; use schedule='chunks'")
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks={self.chunks} must be 1..{MAX_CHUNKS}")

    def __str__(self) -> str:
        return f"chunks={self.chunks}" if self.name == "chunks" else self.name

    def options(self, options: NVLinkOptions | None) -> NVLinkOptions:
        """What was asked for, with what `nvlink` needs for this: a stream of its own, and buffers for a chunk."""
        options = options or NVLinkOptions()
        if self.name == "none":
            return options
        most = None if options.max_tokens is None else -(-options.max_tokens // self.chunks)
        capacity = None if options.capacity is None else min(options.capacity, most or options.capacity)
        # A dispatch is under way while the chunk before it is not combined yet; rows sent again take another each.
        beside = 2 if self.name == "two-batch" else min(self.chunks, 2)
        leases = max(options.num_leases, beside * (2 if options.keep == "again" else 1))
        return replace(options, side_stream=True, max_tokens=most, capacity=capacity, num_leases=leases)
