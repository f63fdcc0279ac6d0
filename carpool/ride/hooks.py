"""Callbacks that tell a scheduler where the backward of a ride is."""

from __future__ import annotations


class RideHooks:
    """Called by the backward of every ride whose `RideSetup` holds it. This one does nothing; a scheduler overrides
    what it needs (`carpool.schedule.priority`)."""

    def before_experts(self) -> None:
        """The last gradients have arrived, and the experts compute next."""


NO_HOOKS = RideHooks()
