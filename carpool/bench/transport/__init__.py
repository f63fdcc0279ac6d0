"""How long rows travel; `benchmark.py` says what is measured and how."""

from __future__ import annotations
