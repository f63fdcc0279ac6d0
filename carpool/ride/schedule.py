"""When each verb of a layer runs. A schedule orders a transport's verbs and the experts; it never changes what they
compute.

    none        the plain ride: one verb after the other, the backward's combine beside a weight gradient
    chunks      tokens ride in chunks; one chunk travels while the experts compute on another. With one chunk this is
                the plain ride (carpool/ride/chunks.py has both)
    two-batch   two micro-batches, or two halves of one, run half a layer apart, attention of one beside the ride of the
                other (`two_batch.py`); whoever calls the model starts them, as `carpool train` does. In a pipeline,
                the forward of one beside the backward of another (`forward_backward.py`)

A ride is hidden only if its transport works beside the computation: `nvlink` has a stream of its own for that, and so
has NCCL. gloo on a CPU gives the same numbers and hides nothing.

`SCHEDULES` is the only list: settings, what "auto" times and the layers read it. A further schedule is one file:

    @register
    class OneAfterAnother(ScheduleKind):
        name = "one-after-another"
        default_chunks = 4

        @classmethod
        def order(cls, schedule, transport, device):
            return MyOrder(schedule.chunks)                 a `carpool.ride.setup.Order`

Then `Schedule("one-after-another", 8)` and `carpool train moe.schedule=one-after-another moe.chunks=8` follow it. A
package names it as an entry point of the group "carpool.schedules" (`carpool.plugins`).
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
    """What one name of `moe.schedule` means. Nobody makes an object of it.

    Attributes:
        default_chunks: in how many chunks tokens ride unless a number is given. None: there is no such number.
        max_chunks: at most.
        backward_chunks: whether the backward may have another number.
        options: the types of further options, by name (`Schedule.options`, moe.schedule_options).
        beside: whether rides travel beside computation, so that transports need a stream of their own.
        whole: whether the experts compute when all tokens of a chunk have come. Experts that have adapters or a
            quantised base, and those that the CPU computes, cannot begin before.
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
        """The order in which the rides of a layer on `device` ask for their verbs.

        Raises:
            ValueError: there is none over this transport."""
        from carpool.ride.chunks import PLAIN, ChunkedOrder

        if schedule.pieces == 1:
            return PLAIN
        return ChunkedOrder(schedule.chunks, schedule.backward_chunks or schedule.chunks)

    @classmethod
    def pieces(cls, schedule: Schedule) -> int:
        """In how many pieces tokens ride: both numbers of chunks divide it (`chunks.py`)."""
        return math.lcm(schedule.chunks, schedule.backward_chunks or schedule.chunks)

    @classmethod
    def rides_under_way(cls, schedule: Schedule) -> int:
        """The most dispatches that are without their combine at one time."""
        # The next chunk's dispatch is launched before this chunk's combine.
        together = schedule.pieces // min(schedule.chunks, schedule.backward_chunks or schedule.chunks)
        return min(schedule.pieces, 2 * together)

    @classmethod
    def check_options(cls, options: TransportOptions) -> None:
        """Raise ValueError if rides of transports with these options cannot follow it."""

    @classmethod
    def why_not(cls, experts: Experts, weights: ExpertWeights) -> str | None:
        """Why a layer on a GPU cannot follow it, or None. `weights`: any of the layer's shapes and dtype."""
        return None

    @classmethod
    def candidates(cls, transport: Transport | None) -> Sequence[Schedule]:
        """What moe.schedule = "auto" times of it, over this transport."""
        return ()


def _check(name: str, kind: type[ScheduleKind]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, ScheduleKind)):
        raise ValueError(f"schedule {name!r} must be a subclass of carpool.ride.schedule.ScheduleKind, not {kind!r}")
    if getattr(kind, "name", None) != name:
        raise ValueError(f"schedule {name!r}: its class {kind.__name__} is named otherwise; give both the same name")


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
    "schedule", "carpool.schedules", {kind.name: kind for kind in (NoSchedule, Chunks, TwoBatchKind)}, _check
)


def register(kind: type[Any]) -> type[Any]:
    """Add a schedule under its `name`. Returns it, so it can decorate a class.

    Raises:
        ValueError: another one has the name, or it is no `ScheduleKind`."""
    return SCHEDULES.register(kind)


@dataclass(frozen=True)
class Schedule:
    """One of `SCHEDULES`, with its numbers.

    Attributes:
        name: of the schedule.
        chunks: in how many chunks tokens ride. All ranks of a group alike.
        backward_chunks: in how many they do in the backward. None: as many.
        options: what else the schedule takes, by name.

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
        """What the name means."""
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
