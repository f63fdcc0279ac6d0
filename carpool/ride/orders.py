"""Which order of verbs a schedule asks for. This is the one place where it is chosen."""

from __future__ import annotations

import torch

from carpool.ride.chunks import PLAIN, ChunkedOrder
from carpool.ride.schedule import Schedule
from carpool.ride.setup import Order
from carpool.ride.tiles import TiledOrder
from carpool.transport import Transport


def order_of(schedule: Schedule, transport: Transport, device: torch.device) -> Order:
    """The order in which the rides of a layer ask for their verbs.

    Args:
        device: of the layer.

    Raises:
        ValueError: tiles on a GPU, over a transport that does not ride in parts."""
    if schedule.name == "tiles":
        if transport.rides_in_parts:
            return TiledOrder(schedule.chunks)
        # On a CPU nothing hides anything: the same number of chunks lets a configuration be tried there.
        if device.type == "cuda":
            raise ValueError(
                f"schedule='tiles' cannot be used here: transport {transport.name!r} has no signals by part; "
                "use schedule='chunks'"
            )
    if schedule.pieces == 1:
        return PLAIN
    return ChunkedOrder(schedule.chunks, schedule.backward_chunks or schedule.chunks)
