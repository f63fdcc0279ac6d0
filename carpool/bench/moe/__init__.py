"""How fast MoE layers compute: experts alone on one device (`moe_contest.py`), whole layers over ranks
(`layer_contest.py`)."""
