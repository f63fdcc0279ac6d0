"""Benchmarks that anybody can run on their own machine: `carpool bench NAME`.

`transport` times how rows travel, all transports side by side (`transport.py`).
"""

from __future__ import annotations
