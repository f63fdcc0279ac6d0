"""What holds an expert: homes and slots, and the slot that serves a token (`expert_layout.py`), and the layouts
of all layers of a model (`layouts.py`)."""

from carpool.layout.expert_layout import ExpertLayout, assign

__all__ = ["ExpertLayout", "assign"]
