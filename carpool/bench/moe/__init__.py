"""How fast MoE layers compute: the experts alone on one device (`experts.py`), whole layers over ranks (`layer.py`)."""

from __future__ import annotations
