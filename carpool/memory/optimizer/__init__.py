"""The optimizer's state and its step: exact AdamW in one pass, float32 masters of bfloat16 weights, moments in fewer
bits."""

from carpool.memory.optimizer.adamw import AdamW, Moments

__all__ = ["AdamW", "Moments"]
