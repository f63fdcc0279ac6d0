"""Benchmarks that anybody can run on their own machine: `carpool bench NAME`.

| name        | what is measured, all contenders checked and side by side in one run              | where        |
|-------------|-----------------------------------------------------------------------------------|--------------|
| `transport` | how rows travel, all transports, beside the ceiling of plain copies               | `transport/` |
| `experts`   | what experts compute on one device, Carpool's and transformers'                   | `moe/`       |
| `layer`     | whole MoE layers over ranks, against transformers' expert parallelism             | `moe/`       |
| `model`     | whole training steps of real configurations, and where their time goes            | `model/`     |

They share how things are timed and who is next (`timing.py`), what a case is and who is in it (`cases.py`), who chooses
which expert (`routings.py`), what one can ask for (`options.py`), how ranks are started (`ranks.py`), and how a run
becomes files (`results.py`, `plot.py`). The scripts of `benchmarks/` take turns by `timing.in_turns`, and
share what stands in `script.py`.
"""

from __future__ import annotations
