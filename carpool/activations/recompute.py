"""Activation checkpointing that computes a layer again, but not its ride.

A checkpointed decoder layer keeps its input and computes everything else a second time in the backward. For a ride that
means that every row travels twice, and every expert computes twice. With

    checkpoint(layer, x, use_reentrant=False, context_fn=carpool.keep_rides)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": carpool.keep_rides})    # transformers

rides are left out of that: the layer that is computed again gets the sums of the first time, and the backward what the
experts kept then.

    forward     attention   router   ride -> y, kept       stays: the layer's input, y, and what the experts keep
    again       attention   router   y, kept
    backward    of the ride, of the router, of attention

It costs memory for y, rows and pre-activations; `KeptPolicies(hidden="recompute")` makes that y and rows. Losses and
gradients are the same, bit by bit. Experts that run a model's own forward are autograd's, not ours: they ride and
compute again.

PyTorch's selective checkpointing would do it too, but watches every operation of the layer, at some 10 us each, and
refuses layers that FSDP2 shards, whose second forward has other profiler ranges than the first (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

import torch

Kept = TypeVar("Kept")


class KeptRides:
    """The rides of one checkpointed region, in the order in which it takes them."""

    def __init__(self) -> None:
        self._rides: list[tuple[torch.Tensor, int, object]] = []
        self._next: int | None = None

    def start(self, again: bool) -> None:
        """The region runs, for the first time or again."""
        self._next = 0 if again else None

    @property
    def again(self) -> bool:
        return self._next is not None

    def ride(self, forward: Callable[[], tuple[torch.Tensor, Kept]]) -> tuple[torch.Tensor, Kept]:
        """What `forward` returns, or what it returned in its place the first time.

        Raises:
            RuntimeError: the region is not the same the second time, or has changed a ride's sums in place."""
        if self._next is None:
            y_TH, kept = forward()
            self._rides.append((y_TH.detach(), y_TH._version, kept))
            return y_TH, kept
        if self._next >= len(self._rides):
            raise RuntimeError(
                f"a checkpointed region took {len(self._rides)} rides in the forward and more when it was computed "
                "again; it must do the same both times, or be checkpointed without carpool.keep_rides"
            )
        y_TH, version, again = self._rides[self._next]
        self._next += 1
        if y_TH._version != version:
            raise RuntimeError(
                "what a MoE layer returned was changed in place (such as by +=) in a checkpointed region that keeps "
                "rides; write y = y + z there, or checkpoint it without carpool.keep_rides"
            )
        return y_TH.detach(), again  # type: ignore[return-value]  # it is what the same place put there


class _Inside(AbstractContextManager[None]):
    """Code that runs in a region. May be entered again: a retained graph computes it once more."""

    def __init__(self, rides: KeptRides, again: bool) -> None:
        self.rides, self.again = rides, again

    def __enter__(self) -> None:
        self.rides.start(self.again)
        self._token = _region.set(self.rides)

    def __exit__(self, *_: object) -> None:
        _region.reset(self._token)


_region: ContextVar[KeptRides | None] = ContextVar("carpool_kept_rides", default=None)


def kept_rides() -> KeptRides | None:
    """Of the region in which this code runs, if there is one."""
    return _region.get()


def taken_before() -> bool:
    """Whether this code runs in a region that is computed again, whose rides are those of the first time."""
    region = _region.get()
    return region is not None and region.again


def keep_rides() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`; see the module's docstring."""
    rides = KeptRides()
    return _Inside(rides, again=False), _Inside(rides, again=True)
