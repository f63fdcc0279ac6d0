"""Whole training steps of many configurations, timed: what the planner's predictions are held against.

    python -m benchmarks.points --ranks 2 --out points.json           # GPUs; --only held for the points held out
    python -m benchmarks.points --ranks 1 --only one --apart --out one.json
    python -m benchmarks.points --ranks 2 --tiny --only fit/olmoe     # on CPUs, tiny models

Names begin with the set that a point is of. `fit` may be looked at while the planner's model is fitted; `held` was
chosen before, and says how good the model is; `one` is held out, too, for one GPU, and `stage` for pipelines. With
`--apart` each point has a process of its own, in which nothing is left of earlier ones. Each point is a run of the
trainer: warmed up, then rounds of steps back to back. The JSON has for each point its settings, milliseconds of a step
(every round, the slowest rank), those that the host works, the peak of PyTorch's tensors with the rides' buffers and
what graphs hold, what earlier points had left behind when it began (`left_bytes`: a peak is known no better), and what
the run had chosen for itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.runs import QWEN_TINY, TINY, GiB, config_of_run, make_runs_parser, measure_runs, start_runs
from carpool.bench.model.model_contenders import CarpoolContender, free_memory
from carpool.bench.model.model_contest import time_steps
from carpool.bench.result_files import print_table
from carpool.bench.timing import medians
from carpool.metrics.host import slowest
from carpool.train.config import Config
from carpool.train.launch.machine import rank_device

BF16 = ["model.dtype=bfloat16", "training.optimizer_state_dtype=bfloat16"]
QWEN = ["model.config=qwen3-30b-a3b", *BF16]
OLMOE = ["model.config=olmoe-1b-7b", *BF16]
GPT_OSS = ["model.config=gpt-oss-20b", *BF16]
MIXTRAL = ["model.config=mixtral-8x7b", *BF16]
GLM = ["model.config=glm-4.5-air", *BF16]
COMPILED, EAGER = ["training.torch_compile=true"], ["training.cuda_graphs=off"]
RECOMPUTE = ["memory.layer_activations=recompute", "memory.expert_activations=recompute"]
CONSUMED = ["training.optimizer_in_backward=true", "training.max_grad_norm=0"]
REPLICATE, FSDP = ["parallelism.data_parallel=zero1"], ["parallelism.data_parallel=fsdp"]
STAGES = ["parallelism.pp_size=2", "training.torch_compile=true"]
ROOT = Path(__file__).resolve().parents[1]
BALANCED, TRACE = "balanced", "docs/traces/e64-1435.npz"
WARMUP = 4


def _stages(layers: int, batch: int, micro_batches: int, schedule: str) -> list[str]:
    return [
        *_sizes(layers, 4096, batch), *STAGES, *REPLICATE,
        f"training.gradient_accumulation_steps={micro_batches}",
        f"parallelism.pp_schedule={schedule}",
    ]  # fmt: skip


def _sizes(layers: int, sequence: int, batch: int) -> list[str]:
    return [
        f"model.config.num_hidden_layers={layers}",
        f"data.sequence_length={sequence}",
        f"training.per_device_train_batch_size={batch}",
        "training.torch_compile=off",  # unless COMPILED follows
    ]


# Settings, and which choices of experts.
POINTS: dict[str, tuple[list[str], str]] = {
    "fit/qwen3 8 layers, graphs": ([*QWEN, *_sizes(8, 4096, 2), *REPLICATE], BALANCED),
    "fit/qwen3 8 layers, compiled": ([*QWEN, *_sizes(8, 4096, 2), *REPLICATE, *COMPILED], BALANCED),
    "fit/qwen3 8 layers, eager, fsdp": ([*QWEN, *_sizes(8, 4096, 2), *FSDP], BALANCED),
    "fit/qwen3 8 layers, recompute": (
        [*QWEN, *_sizes(8, 4096, 2), *REPLICATE, *RECOMPUTE], BALANCED,
    ),
    "fit/qwen3 8 layers, dedup, eager": (
        [*QWEN, *_sizes(8, 4096, 1), *REPLICATE, *EAGER, "moe.transport=dedup"], BALANCED,
    ),
    "fit/olmoe 8 layers, graphs": ([*OLMOE, *_sizes(8, 4096, 4), *REPLICATE], BALANCED),
    "fit/olmoe 8 layers, compiled, trace": ([*OLMOE, *_sizes(8, 4096, 4), *REPLICATE, *COMPILED], TRACE),
    "fit/olmoe 8 layers, experts whole": (
        [*OLMOE, *_sizes(8, 4096, 2), *REPLICATE, *EAGER, "parallelism.ep_size=1"], BALANCED,
    ),
    "fit/gpt-oss 6 layers, graphs": ([*GPT_OSS, *_sizes(6, 4096, 2), *REPLICATE], BALANCED),
    "fit/mixtral 2 layers, graphs": ([*MIXTRAL, *_sizes(2, 4096, 2), *REPLICATE], BALANCED),
    "held/qwen3 8 layers, one sequence": ([*QWEN, *_sizes(8, 4096, 1), *REPLICATE], BALANCED),
    "held/qwen3 6 layers, 8 short sequences": ([*QWEN, *_sizes(6, 1024, 8), *REPLICATE], BALANCED),
    "held/qwen3 6 layers, 16k tokens": ([*QWEN, *_sizes(6, 16384, 1), *REPLICATE], BALANCED),
    "held/qwen3 8 layers, three micro-batches": (
        [*QWEN, *_sizes(8, 4096, 1), *REPLICATE, "training.gradient_accumulation_steps=3"], BALANCED,
    ),
    "held/qwen3 8 layers, hidden recomputed": (
        [*QWEN, *_sizes(8, 4096, 2), *REPLICATE, "memory.expert_activations=recompute"], BALANCED,
    ),
    "held/qwen3 6 layers, two chunks": (
        [*QWEN, *_sizes(6, 4096, 2), *REPLICATE, "moe.schedule=chunks", "moe.chunks=2"], BALANCED,
    ),
    "held/qwen3 6 layers, alltoall, eager": (
        [*QWEN, *_sizes(6, 4096, 2), *REPLICATE, *EAGER, "moe.transport=alltoall"], BALANCED,
    ),
    "held/olmoe 8 layers, trace": ([*OLMOE, *_sizes(8, 4096, 4), *REPLICATE], TRACE),
    "held/olmoe 8 layers, compiled": ([*OLMOE, *_sizes(8, 4096, 2), *REPLICATE, *COMPILED], BALANCED),
    "held/olmoe 8 layers, fsdp": ([*OLMOE, *_sizes(8, 4096, 4), *FSDP], BALANCED),
    "held/olmoe 12 layers, recompute": (
        [*OLMOE, *_sizes(12, 4096, 4), *REPLICATE, *RECOMPUTE], BALANCED,
    ),
    "held/gpt-oss 6 layers, one sequence": ([*GPT_OSS, *_sizes(6, 4096, 1), *REPLICATE], BALANCED),
    "held/gpt-oss 4 layers, fsdp": ([*GPT_OSS, *_sizes(4, 4096, 2), *FSDP], BALANCED),
    "held/mixtral 2 layers, 8k tokens": ([*MIXTRAL, *_sizes(2, 8192, 1), *REPLICATE], BALANCED),
    "held/mixtral 2 layers, fsdp": ([*MIXTRAL, *_sizes(2, 4096, 1), *FSDP], BALANCED),
    "held/glm-4.5-air 4 layers": ([*GLM, *_sizes(4, 4096, 2), *REPLICATE], BALANCED),
    "one/qwen3 10 layers, graphs": ([*QWEN, *_sizes(10, 4096, 2)], BALANCED),
    "one/qwen3 12 layers, consumed, int8": (
        [*QWEN, *_sizes(12, 4096, 2), "training.optimizer_state_dtype=int8", *CONSUMED], BALANCED,
    ),
    "one/qwen3 6 layers, compiled, 16 short sequences": ([*QWEN, *_sizes(6, 1024, 16), *COMPILED], BALANCED),
    "one/qwen3 8 layers, all recomputed": (
        [*QWEN, *_sizes(8, 4096, 8), *RECOMPUTE], BALANCED,
    ),
    "one/qwen3 4 layers, state in host memory": (
        [*QWEN, *_sizes(4, 4096, 4), "training.optimizer_offload=host"], BALANCED,
    ),
    "one/qwen3-235b 2 layers": (["model.config=qwen3-235b-a22b", *BF16, *_sizes(2, 4096, 2)], BALANCED),
    "one/olmoe 16 layers": ([*OLMOE, *_sizes(16, 4096, 2)], BALANCED),
    "one/olmoe 8 layers, trace, three micro-batches": (
        [*OLMOE, *_sizes(8, 2048, 4), "training.gradient_accumulation_steps=3"], TRACE,
    ),
    "one/olmoe 8 layers, PyTorch's AdamW": (
        ["model.config=olmoe-1b-7b", "model.dtype=bfloat16", *_sizes(8, 4096, 2), "training.optimizer=torch"], BALANCED,
    ),
    "one/olmoe 6 layers, float32 moments, eager": (
        ["model.config=olmoe-1b-7b", "model.dtype=bfloat16", *_sizes(6, 4096, 4), *EAGER], BALANCED,
    ),
    "one/gpt-oss 6 layers, flex": ([*GPT_OSS, *_sizes(6, 4096, 2)], BALANCED),
    "one/gpt-oss 4 layers, 8k tokens, hidden recomputed": (
        [*GPT_OSS, *_sizes(4, 8192, 2), "memory.expert_activations=recompute"], BALANCED,
    ),
    "one/mixtral 3 layers": ([*MIXTRAL, *_sizes(3, 4096, 2)], BALANCED),
    "one/mixtral 2 layers, hidden in host memory": (
        [*MIXTRAL, *_sizes(2, 4096, 2), "memory.expert_activations=offload"], BALANCED,
    ),
    "one/glm-4.5-air 3 layers, compiled": ([*GLM, *_sizes(3, 4096, 2), *COMPILED], BALANCED),
    "one/ernie 6 layers, eager": (
        ["model.config=ernie-4.5-21b-a3b", *BF16, *_sizes(6, 4096, 2), *EAGER], BALANCED,
    ),
    "one/deepseek-v3-cut 2 layers": (["model.config=deepseek-v3-cut", *BF16, *_sizes(2, 4096, 1)], BALANCED),
    "stage/qwen3 16 layers, 1F1B, 4": ([*QWEN, *_stages(16, 1, 4, "1F1B")], BALANCED),
    "stage/qwen3 16 layers, 1F1B, 8": ([*QWEN, *_stages(16, 1, 8, "1F1B")], BALANCED),
    "stage/qwen3 16 layers, Interleaved1F1B, 8": ([*QWEN, *_stages(16, 1, 8, "Interleaved1F1B")], BALANCED),
    "stage/qwen3 16 layers, Interleaved1F1B, pairs, 8": (
        [*QWEN, *_stages(16, 1, 8, "Interleaved1F1B"), "moe.schedule=two-batch"], BALANCED,
    ),
    "stage/qwen3 16 layers, ZBVZeroBubble, 8": ([*QWEN, *_stages(16, 1, 8, "ZBVZeroBubble")], BALANCED),
    "stage/qwen3 16 layers, DualPipeV, 8": ([*QWEN, *_stages(16, 1, 8, "DualPipeV")], BALANCED),
    "stage/qwen3 16 layers, DualPipeV, pairs, 8": (
        [*QWEN, *_stages(16, 1, 8, "DualPipeV"), "moe.schedule=two-batch"], BALANCED,
    ),
    "stage/qwen3 16 layers, 1F1B, 4 of 2 sequences, recompute": (
        [*QWEN, *_stages(16, 2, 4, "1F1B"), *RECOMPUTE], BALANCED,
    ),
    "stage/olmoe 16 layers, 1F1B, 8 of 2 sequences": ([*OLMOE, *_stages(16, 2, 8, "1F1B")], BALANCED),
    "stage/mixtral 4 layers, GPipe, 4": ([*MIXTRAL, *_stages(4, 1, 4, "GPipe")], BALANCED),
}  # fmt: skip


def measure(config: Config, settings: dict[str, Any]) -> None:
    """One rank's part; the process group is there."""
    device, tiny = rank_device(), settings["tiny"]

    def one(name: str) -> dict[str, Any]:
        given, routing = POINTS[name]
        if tiny:
            given, routing = [*given, *TINY, *(QWEN_TINY if given[0] == QWEN[0] else [])], BALANCED
        config_of_point = config_of_run(name, given, tiny, Path(config.training.output_dir))
        return {"point": name, **measure_one(config_of_point, routing, settings)}

    found, failed = measure_runs(settings, device, one, line, "points")
    if dist.get_rank() == 0:
        show(found, failed)


def measure_one(config: Config, routing: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Times and peak of a point; of all ranks the highest. Collective."""
    device, begin = rank_device(), time.perf_counter()
    cuda = device.type == "cuda"
    free_memory(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    run = CarpoolContender(config, routing if routing == BALANCED else str(ROOT / routing), "benchmarks.points")
    try:
        for _ in range(WARMUP):
            run.take_step()
        loads = run.state().load
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        rounds = [time_steps(run, settings["steps"], device) for _ in range(settings["rounds"])]
        peak = torch.cuda.max_memory_allocated(device) - before + run.state().buffer_bytes if cuda else 0
        milliseconds, host, _ = medians(rounds)
        plan, built = run.run.plan, run.run.built
        graphs = built.objective.graphs
        return {
            "milliseconds": milliseconds,
            "rounds": rounds,
            "host_milliseconds": host,
            "peak_bytes": int(slowest([peak], device)[0]),
            "left_bytes": before,
            "predicted_bytes": plan.estimate(built.transport.answer, plan.data_parallel.answer)["total"],
            "load_max_over_mean": loads,
            "degrees": plan.degrees.record(),
            "transport": built.transport.answer,
            "dense": plan.data_parallel.answer,
            "schedule": str(built.schedule.answer),
            "graph_bytes": 0 if graphs is None else graphs.bytes,
            "captured": graphs is not None and graphs.bytes > 0,
            "what": run.state().what,
            "routing": routing,
            "config": config.model_dump(mode="json", exclude_unset=True, exclude={"training": {"output_dir"}}),
            "seconds": time.perf_counter() - begin,
        }
    finally:
        run.close()


def line(point: dict[str, Any]) -> str:
    return f"{point['milliseconds']:.1f} ms, {point['what']}"


def show(found: list[dict[str, Any]], failed: dict[str, str]) -> None:
    console = Console(width=140)
    rows = [
        [
            one["point"],
            f"{one['milliseconds']:.1f}",
            f"{one['host_milliseconds']:.1f}",
            f"{one['peak_bytes'] / GiB:.1f}",
            "yes" if one["captured"] else "no",
        ]
        for one in found
    ]
    print_table(console, "whole steps", ["", "ms", "host ms", "GiB of tensors", "captured"], rows)
    for name, why in failed.items():
        console.print(f"{name}: {why}", highlight=False)


def main() -> None:
    parser = make_runs_parser(__doc__, "point", seconds=400)
    parser.add_argument("--steps", type=int, default=4, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    start_runs(parser, dict.fromkeys(POINTS, 1), "benchmarks.points:measure", key="points")


if __name__ == "__main__":
    main()
