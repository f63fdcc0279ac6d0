"""Callbacks that tell a scheduler where the backward of a ride is."""

from __future__ import annotations


class RideHooks:
    """Called by the backward of every ride whose `RideSetup` holds it, in the order below. This one does nothing; a
    scheduler overrides what it needs (`carpool.schedule.priority`)."""

    def before_verb(self) -> None:
        """A dispatch or a combine is launched next and will use the links."""

    def gradients_under_way(self) -> None:
        """The gradients travel to the experts, and this rank has nothing else to compute until they arrive."""

    def before_experts(self, links_free: bool) -> None:
        """The last gradients have arrived, and the experts compute next. `links_free`: no other rows travel
        meanwhile."""

    def after_last_verb(self) -> None:
        """Everything that was launched has been waited for."""


NO_HOOKS = RideHooks()
