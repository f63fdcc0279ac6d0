"""How long rows travel; `ride_contest.py` says what is measured and how."""

from __future__ import annotations
