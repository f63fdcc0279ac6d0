"""What is kept for the backward pass, and where."""

from __future__ import annotations

from carpool.memory.arena import Arena, Rows

__all__ = ["Arena", "Rows"]
