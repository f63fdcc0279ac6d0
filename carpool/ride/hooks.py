"""What a rank does beside the rides of its backward; the rides say when."""

from __future__ import annotations


class Beside:
    """Told by each ride's backward (`carpool.schedule.chunks`) where it is. This one does nothing about it;
    `carpool.schedule.priority` and `carpool.schedule.delayed` do."""

    def links_taken(self) -> None:
        """What is asked for next takes the links."""

    def gradients_asked(self) -> None:
        """Gradients are on their way to the experts, and nothing computes meanwhile."""

    def gradients_came(self, links_free: bool) -> None:
        """The last gradients have been waited for; the experts compute next. `links_free`: nothing else is on its way
        meanwhile."""

    def links_free(self) -> None:
        """All that was asked for has been waited for."""
