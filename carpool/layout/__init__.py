"""What holds an expert: homes and slots (`expert_layout.py`), the slot that serves a token (`assigning.py`), and
the layouts of all layers of a model (`layouts.py`)."""

from carpool.layout.assigning import assign
from carpool.layout.expert_layout import ExpertLayout

__all__ = ["ExpertLayout", "assign"]
