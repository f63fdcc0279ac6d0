"""Benchmarks that anybody can run on their own machine: `carpool bench NAME`.

| name        | what is measured, all contenders checked and side by side in one run          | where               |
|-------------|-------------------------------------------------------------------------------|---------------------|
| `transport` | how rows travel, all transports, beside the ceiling of plain copies           | `transport/`        |
| `experts`   | what experts compute on one device, Carpool's and transformers'               | `moe/`              |
| `layer`     | whole MoE layers over ranks, against transformers' expert parallelism         | `moe/`              |
| `model`     | whole training steps of real configurations, and where their time goes        | `model/`            |
| `generate`  | prefill and decoding of real configurations                                   | `bench_generate.py` |

They share what one can ask for (`options.py`, `bench_settings.py`, `model/model_settings.py`), how ranks are started
and what a case and a contender are (`contest.py`), how things are timed and who is next (`timing.py`), who chooses
which expert (`routings.py`), and how a run becomes files (`result_files.py`, `plots.py`). `hardware/` is what `carpool
doctor --measure` measures. The scripts of `benchmarks/` take turns by `timing.in_turns`, and share
what stands in `script.py`.
"""
