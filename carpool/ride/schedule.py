"""Schedules: the order of a layer's verbs and expert computations. A schedule never changes what they compute.

    none        the plain ride: one verb after the other, the backward's combine overlapped with a weight gradient
    chunks      tokens are cut into chunks; one chunk is communicated while the experts compute on another. With one
                chunk this is the plain ride (carpool/ride/chunks.py has both)
    two-batch   two micro-batches, or two halves of one, run half a layer apart, so that the attention of one overlaps
                the ride of the other (`two_batch.py`); the trainer starts them. In a pipeline, the forward of one
                overlaps the backward of another (`forward_backward.py`)

Overlap requires a transport that runs concurrently with computation: `nvlink` and NCCL have streams of their own. gloo
on a CPU gives the same numbers without overlap.

`SCHEDULES` is the only list: settings, the candidates of "auto" and the layers read it. A further schedule is one file:

    @register
    class OneAfterAnother(ScheduleKind):
        name = "one-after-another"
        default_chunks = 4

        @classmethod
        def order(cls, schedule, transport, device):
            return MyOrder(schedule.chunks)                 a `carpool.ride.setup.Order`

Then `Schedule("one-after-another", 8)` and `carpool train moe.schedule=one-after-another moe.chunks=8` use it. A
package declares it as an entry point of the group "carpool.schedules" (`carpool.plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from carpool.plugins import Registry, unknown

if TYPE_CHECKING:
    import torch

    from carpool.experts import Experts, ExpertWeights
    from carpool.ride.setup import Order
    from carpool.transport import Transport, TransportOptions

__all__ = ["MAX_CHUNKS", "SCHEDULES", "Schedule", "ScheduleKind", "register"]

MAX_CHUNKS = 64


class ScheduleKind:
    """The definition of one name of `moe.schedule`. It is not instantiated.

    Attributes:
        default_chunks: the default number of chunks. None: the schedule has no chunks.
        max_chunks: the largest number of chunks.
        backward_chunks: whether the backward may have another number.
        options: the types of further options, by name (`Schedule.options`, moe.schedule_options).
        beside: whether rides overlap computation, so that transports need a stream of their own.
        whole: whether the experts start after all tokens of a chunk have arrived, as experts with adapters or a
            quantised base, and those on the CPU, require.
    """

    name: ClassVar[str]
    default_chunks: ClassVar[int | None] = None
    max_chunks: ClassVar[int] = MAX_CHUNKS
    backward_chunks: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = {}
    beside: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    @classmethod
    def order(cls, schedule: Schedule, transport: Transport, device: torch.device) -> Order:
        """The order of the verbs in the rides of a layer on `device`.

        Raises:
            ValueError: the schedule does not support this transport."""
        from carpool.ride.chunks import PLAIN, ChunkedOrder

        if schedule.pieces == 1:
            return PLAIN
        return ChunkedOrder(schedule.chunks, schedule.backward_chunks or schedule.chunks)

    @classmethod
    def pieces(cls, schedule: Schedule) -> int:
        """The number of pieces of a ride, which both numbers of chunks divide (`chunks.py`)."""
        return math.lcm(schedule.chunks, schedule.backward_chunks or schedule.chunks)

    @classmethod
    def rides_under_way(cls, schedule: Schedule) -> int:
        """The largest number of dispatches that are without their combine at one time."""
        # The next chunk's dispatch is launched before this chunk's combine.
        together = schedule.pieces // min(schedule.chunks, schedule.backward_chunks or schedule.chunks)
        return min(schedule.pieces, 2 * together)

    @classmethod
    def check_options(cls, options: TransportOptions) -> None:
        """Raise ValueError if these transport options do not support the schedule."""

    @classmethod
    def why_not(cls, experts: Experts, weights: ExpertWeights) -> str | None:
        """Why a layer on a GPU cannot use it, or None. `weights`: any weights of the layer's shapes and dtype."""
        return None

    @classmethod
    def candidates(cls, transport: Transport | None) -> Sequence[Schedule]:
        """The candidates that moe.schedule = "auto" times, with this transport."""
        return ()


class NoSchedule(ScheduleKind):
    name = "none"
    beside = False

    @classmethod
    def candidates(cls, transport: Transport | None) -> Sequence[Schedule]:
        return (Schedule(),)


class Chunks(ScheduleKind):
    name = "chunks"
    default_chunks = 2
    backward_chunks = True

    @classmethod
    def candidates(cls, transport: Transport | None) -> Sequence[Schedule]:
        return tuple(Schedule("chunks", chunks) for chunks in (1, 2, 4, 8))


class TwoBatchKind(ScheduleKind):
    name = "two-batch"

    @classmethod
    def rides_under_way(cls, schedule: Schedule) -> int:
        return 2


SCHEDULES: Registry[type[ScheduleKind]] = Registry(
    "schedule", "carpool.schedules", {kind.name: kind for kind in (NoSchedule, Chunks, TwoBatchKind)}, base=ScheduleKind
)
register = SCHEDULES.register


@dataclass(frozen=True)
class Schedule:
    """One of `SCHEDULES`, with its numbers.

    Attributes:
        chunks: number of chunks, the same on all ranks of a group.
        backward_chunks: number of chunks in the backward. None: the same.
        options: further options of the schedule, by name.

    Raises:
        ValueError: an unknown name, or a number of chunks that makes no sense for it.

    Example: Schedule("chunks", 4)
    """

    name: str = "none"
    chunks: int = 1
    backward_chunks: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(unknown(SCHEDULES, self.name))
        kind, most = self.kind, self.kind.max_chunks
        if kind.default_chunks is None and self.chunks != 1:
            raise ValueError(f"schedule={self.name!r} has one chunk, not {self.chunks}; use schedule='chunks'")
        if not 1 <= self.chunks <= most:
            raise ValueError(f"chunks={self.chunks} must be 1..{most} with schedule={self.name!r}")
        if wrong := sorted(set(self.options) - set(kind.options)):
            raise ValueError(f"schedule={self.name!r} has no option {wrong[0]!r}: {', '.join(kind.options) or 'none'}")
        if self.backward_chunks is None:
            return
        if not kind.backward_chunks:
            raise ValueError(f"backward_chunks={self.backward_chunks} is of schedule='chunks', not {self.name!r}")
        if self.backward_chunks < 1 or self.pieces > most:
            raise ValueError(
                f"backward_chunks={self.backward_chunks} must be positive, and its least common multiple with "
                f"chunks={self.chunks} at most {most}: experts compute on so many pieces"
            )

    @property
    def kind(self) -> type[ScheduleKind]:
        """The definition of the name."""
        return SCHEDULES[self.name]

    @property
    def pieces(self) -> int:
        """See `ScheduleKind.pieces`."""
        return self.kind.pieces(self)

    @property
    def rides_under_way(self) -> int:
        """See `ScheduleKind.rides_under_way`."""
        return self.kind.rides_under_way(self)

    def order(self, transport: Transport, device: torch.device) -> Order:
        """See `ScheduleKind.order`."""
        return self.kind.order(self, transport, device)

    def __str__(self) -> str:
        if self.kind.default_chunks is None:
            return self.name
        return f"{self.name}={self.chunks}" + ("" if self.backward_chunks is None else f",{self.backward_chunks}")
