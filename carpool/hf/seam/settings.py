"""What can be set for all MoE layers of a model, on all ranks alike, between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from carpool.activations import KeptPolicies, Offloader
from carpool.experts import Choices
from carpool.hf.seam.rides import required_rides, rides
from carpool.hf.seam.shared import compute_shared_beside
from carpool.ride.schedule import Schedule
from carpool.transport import TransportOptions


def set_transport(
    model: nn.Module, name: str, *, max_tokens: int | None = None, options: TransportOptions | None = None
) -> None:
    """Change how rows travel in all MoE layers of a model. Call on all ranks, between steps.

    Args:
        name: "auto", "gather", "alltoall", "dedup", "nvlink", "hierarchical", "local".
        max_tokens: the most tokens that any rank will ever have in a forward. Given this, "auto" picks "nvlink" where
            it can be used. Its buffers have a fixed size; without it, that of the first forward, rounded up to a power
            of two. Tokens beyond make the sums NaN, and `CarpoolCallback` then raises before the optimizer's step.
        options: of the transport, such as `carpool.transport.NVLinkOptions`. Neither given: as before.
    """
    layers = required_rides(model)
    if max_tokens is not None:
        options = replace(options or TransportOptions(), max_tokens=max_tokens)
    for own in layers.values():
        own.set_transport(name, options)


def set_kept(model: nn.Module, policies: KeptPolicies) -> None:
    """Change what is done about the rows and the pre-activations that the backwards of all MoE layers of a model need
    (carpool/activations/__init__.py). Call on all ranks, between steps.

    Raises:
        ValueError: the experts cannot."""
    offloader = Offloader() if policies.offloads else None
    for own in required_rides(model).values():
        own.set_kept(policies, offloader)


def set_experts(model: nn.Module, name: str, *, choices: Choices | None = None, **others: Any) -> list[str]:
    """Change how the experts of all MoE layers of a model are computed: "auto", "grouped", "reference", or "fp8".

    Args:
        choices: of "grouped", the way of each stage (`carpool.experts.Choices`). None: by the shape. Layers that run
            the model's own forward have no stages.
        others: options of a plug-in's.

    Returns:
        What that changes of the model's function, for logs: nothing but for "fp8", which is LOSSY.

    Raises:
        ValueError: an unknown name, experts that it cannot compute, or an option that they do not have."""
    layers = required_rides(model)
    for own in layers.values():
        own.set_experts(name, choices, **others)
    return list(dict.fromkeys(why for own in layers.values() for why in getattr(own.compute, "lossy_reasons", ())))


@contextmanager
def transport(model: nn.Module, name: str, options: TransportOptions | None = None) -> Iterator[None]:
    """Use another transport inside a `with`, then go back to what was there."""
    before = {own: (own.requested, own.options) for own in rides(model).values()}
    set_transport(model, name, options=options)
    try:
        yield
    finally:
        for own, (requested, old) in before.items():
            own.options = old
            own.set_transport(requested)


def set_schedule(model: nn.Module, schedule: Schedule) -> None:
    """Change what runs beside what in all MoE layers of a model (carpool/ride/schedule.py), shared experts included:
    with any schedule but "none" they compute beside the ride. On all ranks, between steps."""
    for own in required_rides(model).values():
        own.set_schedule(schedule)
    compute_shared_beside(model, schedule.name != "none")
