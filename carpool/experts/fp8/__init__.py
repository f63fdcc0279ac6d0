"""Experts that compute in FP8. LOSSY; `fp8_experts.py` says how."""

from carpool.experts.fp8.fp8_experts import FP8Experts

__all__ = ["FP8Experts"]
