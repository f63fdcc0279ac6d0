"""How parameters are updated: exact AdamW in one pass, float32 masters of bfloat16 weights, moments in fewer bits,
state in host memory, updates inside of the backward, and clipping."""

from carpool.optim.adamw import AdamW, Moments

__all__ = ["AdamW", "Moments"]
