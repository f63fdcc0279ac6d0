"""Where experts should live: the objective. Needs no accelerator and nothing that moves rows."""

from __future__ import annotations

from carpool.placement.volume import VERBS, Volume, predict

__all__ = ["VERBS", "Volume", "predict"]
