"""Occult's placement by collaboration ("Optimizing Collaborative Communication across Experts for Accelerated Parallel
MoE Training and Inference", ICML 2025), with which the search of `carpool place` begins, and Occult ends."""

from __future__ import annotations

from carpool.placement.solvers.search import by_pairs as occult

__all__ = ["occult"]
