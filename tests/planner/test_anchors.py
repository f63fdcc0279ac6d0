"""Known systems by datasheets alone: intervals that contain them, and one honest miss (docs/planner.md)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from carpool.parallel.degrees import Degrees
from carpool.planner.candidate import KEEP, Candidate
from carpool.planner.hardware import find_hardware
from carpool.planner.model_shape import ModelShape
from carpool.planner.step import predict
from carpool.planner.work import Work
from carpool.train.config.published import read_keys


def test_megatron_bridge_on_16_h100() -> None:
    shape, h100 = ModelShape.read(read_keys("qwen3-30b-a3b")), find_hardware("H100")
    candidate = Candidate(
        Degrees(1, 16, 1, 8), 4096, 2, 4, dense="fsdp", policies={**KEEP, "hidden": "recompute"}, moments="bfloat16"
    )
    mfu = predict(shape, h100, candidate, 8).mfu
    assert mfu is not None and mfu.low < 299 / 989 < mfu.high


def test_deepseek_v3_on_2048_h800_is_missed() -> None:
    """2.788 M GPU hours for 14.8 T tokens: more than what computes, less than with rides that nothing hides."""
    shape, h800 = ModelShape.read(read_keys("deepseek-v3")), find_hardware("H800")
    fp8 = {name: h800.kernel(name) for name in ("dense", "experts", "experts backward")}
    faster = {name: replace(work, flops_per_second=1.6 * (work.flops_per_second or 0)) for name, work in fp8.items()}
    machine = replace(h800, kernels={**faster, "host ride": Work(latency=1e-6)})
    policies = {**KEEP, "hidden": "recompute", "rows": "resend"}
    short, micro_batches = 16, 120
    candidate = Candidate(
        Degrees(1, 128, 1, 64, pp=16), 4096, 1, short, "hierarchical", policies=policies, moments="bfloat16"
    )
    one = predict(shape, machine, candidate, 8)
    two = predict(shape, machine, replace(candidate, accumulation=short + 1), 8)
    step = one.seconds.middle + (micro_batches - short) * (two.seconds.middle - one.seconds.middle)
    hours = 14.8e12 / (micro_batches * 128 * 4096) * 2048 / 3600 / 1e6
    computing: defaultdict[int, float] = defaultdict(float)
    for event in one.graph.events:
        computing[event.stage] += event.seconds * (event.stream == "computation")
    alone = max(computing.values()) / short * (micro_batches + 15)
    assert hours * alone < 2.788 < 0.7 * hours * step
