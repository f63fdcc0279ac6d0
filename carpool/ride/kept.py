"""What the forward of a ride keeps for its backward, and what the policies of `carpool.activations` do about it.

    kept = put_away(kept, setup)       after the forward: what is to be offloaded is under way to host memory
    kept = bring_back(kept, setup)     before the backward: it is on the device again

Rows that will be sent again are none: an order keeps what it sends instead. Pre-activations that will be computed again
are none either: experts do not keep them.
"""

from __future__ import annotations

from typing import Any, Literal

from carpool.activations import Arena, Away, Rows
from carpool.activations.layer_offload import stay_on_device
from carpool.ride.setup import Kept, RideSetup
from carpool.ride.turns import half_number


def arena_for(item: Literal["rows", "hidden"], setup: RideSetup, backward: bool = True) -> Arena | None:
    """Where a ride writes an item whose rows only the device can count."""
    if not backward or getattr(setup.policies, item) != "offload":
        return setup.transport.arena
    assert setup.offloader is not None
    return setup.offloader.staging(setup.transport.arena, half_number())


def put_away(kept: tuple[Kept, ...], setup: RideSetup) -> tuple[Kept, ...]:
    """The same, with `Away` in the place of what is offloaded."""
    policies = setup.policies
    if policies.rows == "save":
        stay_on_device(one.x.data for one in kept)
    if policies.hidden == "save":
        stay_on_device(item.data for one in kept for item in one.saved if isinstance(item, Rows))
    if setup.offloader is None:
        return kept
    items = [one.x for one in kept if policies.rows == "offload"]
    if policies.hidden == "offload":
        items += [item for one in kept for item in one.saved if isinstance(item, Rows)]
    if not items:
        return kept
    away = dict(zip(map(id, items), setup.offloader.put(items, half_number()), strict=True))
    return tuple(_replaced(one, lambda item: away.get(id(item), item)) for one in kept)


def bring_back(kept: tuple[Kept, ...], setup: RideSetup) -> tuple[Kept, ...]:
    """The same, with rows on the device in the place of `Away`."""
    away = [item for one in kept for item in (one.x, *one.saved) if isinstance(item, Away)]
    if not away:
        return kept
    assert setup.offloader is not None
    back = dict(zip(map(id, away), setup.offloader.get(away), strict=True))
    return tuple(_replaced(one, lambda item: back.get(id(item), item)) for one in kept)


def _replaced(one: Kept, change: Any) -> Kept:
    return Kept(one.route, change(one.x), tuple(map(change, one.saved)))
