"""What the forward of a ride saves for its backward: through autograd, offloaded to host memory, or in an arena.

    kept = put_away(kept, setup)       after the forward: what is to be offloaded is under way to host memory
    save(ctx, weights, kept, setup)    autograd holds the tensors
    weights, kept = saved(ctx)         in the backward
    kept = bring_back(kept, setup)     what was offloaded is on the device again

What the policies of `carpool.activations` say is done here. Rows that will be sent again are not saved: an order
keeps what it sends instead. Pre-activations that will be computed again are not saved either: experts do not keep them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from carpool.activations import Arena, Away, Rows
from carpool.activations.whole_layers import stay_on_device
from carpool.experts import ExpertWeights
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
    if setup.offloader is None:
        return kept
    away = [item for one in kept for item in (one.x, *one.saved) if isinstance(item, Away)]
    if not away:
        return kept
    back = dict(zip(map(id, away), setup.offloader.get(away), strict=True))
    return tuple(_replaced(one, lambda item: back.get(id(item), item)) for one in kept)


def _replaced(one: Kept, change: Any) -> Kept:
    return Kept(one.route, change(one.x), tuple(map(change, one.saved)))


def save(ctx: Any, weights: ExpertWeights, kept: tuple[Kept, ...], setup: RideSetup) -> None:
    """Save what a ride keeps through autograd, which lets checkpointing and offloading see the tensors.

    Of rows in an arena they see where these begin. Its memory is all layers': a hook would copy it for each of them.
    Where a layer's activations are offloaded (`carpool.activations.whole_layers`), weights stay on the device, and so
    does what a policy of the ride keeps."""
    tensors: list[torch.Tensor | None] = list(weights)
    stay: list[torch.Tensor | None] = list(weights)
    # Of each `Kept`, its route and items: `Rows` without tensors, or the place of a tensor.
    plan: list[tuple[Any, list[Rows | None]]] = []
    for one in kept:
        items: list[Rows | None] = []
        for item in (one.x, *one.saved):
            if not isinstance(item, Rows):
                tensors.append(item)
                items.append(None)
                continue
            shared = item.arena is not None
            tensors += (None if shared else item.data, item.start, item.home, item.count)
            data: Any = item.data if shared else None
            items.append(replace(item, data=data, start=None, home=None, count=None))
            policy = setup.policies.rows if item is one.x else setup.policies.hidden
            stay += (item.start, item.data if policy == "save" or isinstance(item, Away) else None)
        plan.append((one.route, items))
    stay_on_device(stay)
    ctx.plan, ctx.setup = plan, setup
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[ExpertWeights, tuple[Kept, ...]]:
    """What `save` was given.

    Raises:
        RuntimeError: a hook has put a copy in the place of where rows in an arena begin."""
    # Read once: with checkpointing each reading would run the forward again, and torch refuses the second.
    tensors = ctx.saved_tensors
    place = len(ExpertWeights._fields)
    weights, kept = ExpertWeights._make(tensors[:place]), []
    for route, items in ctx.plan:
        found: list[Any] = []
        for item in items:
            if item is None:
                found.append(tensors[place])
                place += 1
                continue
            data, start, home, count = tensors[place : place + 4]
            place += 4
            if item.arena is None:
                item = replace(item, data=data)
            elif start is not None and not item.arena.holds(start):
                raise RuntimeError(
                    "rows in an arena were let go before their backward: a hook on saved tensors (save_on_cpu, "
                    "offloading) put a copy in the place of where they begin; leave out that hook, and offload them by "
                    "carpool.ActivationPolicies (carpool train: memory.rows and memory.hidden)"
                )
            found.append(replace(item, start=start, home=home, count=count))
        kept.append(Kept(route, found[0], tuple(found[1:])))
    return weights, tuple(kept)
