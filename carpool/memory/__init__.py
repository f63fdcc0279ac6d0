"""What is kept for the backward pass, and where."""

from __future__ import annotations

from carpool.memory.arena import Arena
from carpool.memory.arrivals import Arrivals, Ready
from carpool.memory.offload import Away, Offloader
from carpool.memory.policies import KEEP, KeptPolicies
from carpool.memory.rows import Rows

__all__ = ["KEEP", "Arena", "Arrivals", "Away", "KeptPolicies", "Offloader", "Ready", "Rows"]
