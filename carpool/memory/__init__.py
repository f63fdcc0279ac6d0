"""What is kept for the backward pass, and where."""

from __future__ import annotations

from carpool.memory.arena import Arena
from carpool.memory.arrivals import Arrivals, Ready
from carpool.memory.rows import Rows

__all__ = ["Arena", "Arrivals", "Ready", "Rows"]
