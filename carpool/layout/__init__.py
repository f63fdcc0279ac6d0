"""What holds an expert: `expert_layout.py` defines homes and slots, `layouts.py` the layouts of a model's layers."""

from carpool.layout.expert_layout import ExpertLayout, assign, on_gpu

__all__ = ["ExpertLayout", "assign", "on_gpu"]
