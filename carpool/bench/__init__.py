"""Benchmarks that anybody can run on their own machine: `carpool bench NAME`.

| name        | what is measured, all contenders checked and side by side in one run              | where        |
|-------------|-----------------------------------------------------------------------------------|--------------|
| `transport` | how rows travel, all transports, beside the ceiling of plain copies               | `transport/` |
| `experts`   | what experts compute on one device, Carpool's and transformers'                   | `moe/`       |
| `layer`     | whole MoE layers over ranks, against transformers' expert parallelism             | `moe/`       |

They share how things are timed (`timing.py`), who chooses which expert (`routings.py`), what one can ask for
(`options.py`), and how a run becomes files (`results.py`, `plot.py`).
"""

from __future__ import annotations
