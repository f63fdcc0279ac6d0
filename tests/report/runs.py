"""Writes run directories as the trainer does, from a small simulation of routing, so that their numbers agree.

Each token draws its K experts by popularity (Gumbel top-k); popularity starts skewed and evens out. Loads, copies per
token, traffic and bytes all follow from those draws. The rest (losses, times) are smooth curves with noise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

START = 1_790_000_000.0


@dataclass(frozen=True)
class Shape:
    """What is simulated; `sampled` tokens stand for `tokens` of a step."""

    steps: int = 120
    ranks: int = 4
    layers: int = 4
    experts: int = 16
    chosen: int = 4
    hidden: int = 128
    tokens: int = 8192
    sampled: int = 512
    itemsize: int = 4
    gpu: bool = False
    seed: int = 0


def _route(shape: Shape, step: int, rng: np.random.Generator) -> dict[str, Any]:
    """load_LE, copies_L, rows_WW and remote rows of one step."""
    scale = shape.tokens // shape.sampled
    home_T = np.arange(shape.sampled) * shape.ranks // shape.sampled
    rank_of_E = np.arange(shape.experts) * shape.ranks // shape.experts
    load_LE, copies_L = [], []
    rows_WW = np.zeros((shape.ranks, shape.ranks), dtype=int)
    remote_alltoall = 0
    for layer in range(shape.layers):
        popularity_E = np.random.default_rng((shape.seed, layer)).normal(
            0, 1.2 / (1 + 4 * step / shape.steps), shape.experts
        )
        score_TE = popularity_E + rng.gumbel(size=(shape.sampled, shape.experts))
        expert_TK = np.argsort(-score_TE, axis=1)[:, : shape.chosen]
        load_LE.append((np.bincount(expert_TK.ravel(), minlength=shape.experts) * scale).tolist())
        visits_TW = np.zeros((shape.sampled, shape.ranks), dtype=bool)
        np.put_along_axis(visits_TW, rank_of_E[expert_TK], True, axis=1)
        copies_L.append(float(visits_TW.sum() / shape.sampled))
        for rank in range(shape.ranks):
            rows_WW[rank] += visits_TW[home_T == rank].sum(axis=0) * scale
        remote_alltoall += int((rank_of_E[expert_TK] != home_T[:, None]).sum()) * scale
    remote = int(rows_WW.sum() - np.trace(rows_WW))
    row = shape.hidden * shape.itemsize
    return {
        "layers": {
            "load": load_LE, "copies": copies_L, "traffic_rows": rows_WW.tolist(),
            # Choices that each rank computes, over layers, experts in order.
            "rank_load": np.array(load_LE).sum(0).reshape(shape.ranks, -1).sum(1).tolist(),
            "rank_ms": {part: (10 + rng.normal(0, 0.5, shape.ranks)).tolist() for part in ("experts", "rides")},
        },
        "copies_per_token": float(np.mean(copies_L)),
        "rows_remote": remote,
        "bytes_remote": 4 * remote * row,
        "bytes_remote_alltoall": 4 * remote_alltoall * row,
        "load_max_over_mean": float(max(max(load) / np.mean(load) for load in load_LE)),
        "dead_experts": sum(load.count(0) for load in load_LE),
    }  # fmt: skip


def _timing(median: float, calls: int, rng: np.random.Generator) -> dict[str, float]:
    spread = 1.15 + 0.5 * rng.random()
    return {"p50": median, "p99": median * spread, "total": median * calls}


def train_lines(shape: Shape, first: int = 1, last: int | None = None) -> list[dict[str, Any]]:
    """The `train` and `layers` lines of the steps from `first` to `last`, in the order of the trainer."""
    lines: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for step in range(first, (last or shape.steps) + 1):
        rng = np.random.default_rng((shape.seed, step))
        routed = _route(shape, step, rng)
        for key in ("bytes_remote", "bytes_remote_alltoall"):
            # Of the steps before the first one, about as much.
            seen[f"{key}_seen"] = seen.get(f"{key}_seen", (first - 1) * routed[key]) + routed[key]
        layers = routed.pop("layers")
        fast = 0.02 if shape.gpu else 1.0
        ms = {
            "dispatch": _timing(fast * (5.5 + rng.normal(0, 0.3)), 2 * shape.layers, rng),
            "experts": _timing(fast * (17 + rng.normal(0, 0.6)), 2 * shape.layers, rng),
            "combine": _timing(fast * (6.8 + rng.normal(0, 0.4)), 2 * shape.layers, rng),
        }
        step_ms = sum(m["total"] for m in ms.values()) * (1.55 + 0.1 * rng.random())
        lines.append({
            "kind": "train", "step": step, "time": START + step * step_ms / 1000,
            "loss": 1.6 + 4.0 * float(np.exp(-3 * step / shape.steps)) + float(rng.normal(0, 0.05)),
            "aux_loss": 1.0 + 0.3 * float(np.exp(-step / 20)), "learning_rate": 1e-3 * min(1.0, step / 10),
            "grad_norm": 0.6 + 3 * float(np.exp(-step / 8)) + float(abs(rng.normal(0, 0.08))),
            "tokens": shape.tokens, "tokens_seen": shape.tokens * step, **seen, "step_ms": step_ms,
            "tokens_per_second": 1000 * shape.tokens / step_ms,
            "mfu": 0.21 + float(rng.normal(0, 0.004)) if shape.gpu else None,
            "hfu": 0.26 + float(rng.normal(0, 0.004)) if shape.gpu else None,
            "router_entropy": 2.3 + 0.3 * step / shape.steps, "dropped_tokens": 0, "ms": ms,
            "memory_peak_bytes": int(412e6 + 1e5 * min(step, 10)), **routed,
        })  # fmt: skip
        lines.append({"kind": "layers", "step": step, **layers})
    return lines


def side_lines(shape: Shape, every: int = 20) -> list[dict[str, Any]]:
    """Held-out losses, samples, checkpoints and probes."""
    lines: list[dict[str, Any]] = []
    for step in range(every, shape.steps + 1, every):
        lines.append(
            {"kind": "eval", "step": step, "loss": 1.75 + 4.0 * float(np.exp(-3 * step / shape.steps)), "tokens": 65536}
        )
        text = "def " + (
            "selt(tef, n):\n    rerutn" if step < shape.steps // 2 else "_check(self, name):\n    return self._map"
        )
        lines.append({"kind": "sample", "step": step, "prompt": "def ", "text": f"{text}\n    # step {step}\n"})
        path = f"checkpoints/step-{step:08d}"
        lines.append({"kind": "checkpoint", "step": step, "path": path, "bytes": 38_400_000, "seconds": 0.42})
    probes = (("dedup", [361.0, 355.0, 358.0], 90_000_000), ("alltoall", [452.0, 449.0, 447.0], 120_000_000))
    lines += [
        {"kind": "probe", "step": shape.steps // 2, "transport": name, "step_ms": ms, "bytes_remote": moved}
        for name, ms, moved in probes
    ]
    return lines


def run_info(shape: Shape, **changes: Any) -> dict[str, Any]:
    """The content of run.json."""
    memory = {"parameters": 38e6, "gradients": 38e6, "optimizer": 76e6, "activations": 190e6, "transport": 25e6}
    per_rank = shape.experts // shape.ranks
    missed = float(np.prod([1 - per_rank / (shape.experts - i) for i in range(shape.chosen)]))
    info = {
        "carpool_version": "0.1.0",
        "started": "2026-11-21T09:14:03+00:00",
        "command": f"carpool train --compare alltoall training.max_steps={shape.steps}",
        "history": [{"started": "2026-11-21T09:14:03+00:00", "from_step": 0, "resumed_from": None}],
        "environment": {
            "hostname": "laptop", "platform": "Linux-6.1-x86_64", "python": "3.11.7", "torch": "2.13.0",
            "transformers": "5.23.0", "triton": None, "cuda": "13.0" if shape.gpu else None,
            "nccl": "2.28.9" if shape.gpu else None, "device": "NVIDIA H200" if shape.gpu else "cpu",
            "device_count": shape.ranks, "commit": "0123456789abcdef0123456789abcdef01234567",
        },
        "model": {
            "architecture": "OlmoeForCausalLM", "parameters": 9_568_000, "active_parameters": 3_150_000,
            "num_experts": shape.experts, "num_experts_per_tok": shape.chosen,
            "moe_layers": [f"model.layers.{i}.mlp.experts" for i in range(shape.layers)],
            "hidden_size": shape.hidden, "moe_intermediate_size": 2 * shape.hidden,
        },
        "parallelism": {
            "world_size": shape.ranks, "fsdp_size": shape.ranks, "tp_size": 1, "ep_size": shape.ranks, "efsdp_size": 1,
            "backend": "nccl" if shape.gpu else "gloo",
        },
        "transport": {"name": "dedup", "requested": "auto"},
        "decisions": {
            "transport": {
                "name": "dedup", "how": "default", "why": "4 of 16 experts over 4 ranks: rides can be shared",
                "shape": {"ranks": 4},
            },
            "schedule": {
                "name": "chunks", "chunks": 2, "backward_chunks": None, "how": "measured",
                "why": "measured, in milliseconds", "shape": {}, "milliseconds": {"none": 1.5, "chunks=2": 1.2},
            },
        },
        "layout": {"kind": "contiguous", "experts_per_rank": [per_rank] * shape.ranks},
        "exact": True,
        "lossy_reasons": [],
        "predicted": {
            "memory_per_rank_bytes": {**memory, "total": sum(memory.values())},
            "copies_per_token_uniform": shape.ranks * (1 - missed), "flops_per_token": 21_000_000,
        },
        "peak_flops": 989e12 if shape.gpu else None,
        "peak_flops_source": "dense bf16, data sheet" if shape.gpu else None,
        "seed": shape.seed,
        "data": {
            "source": "Python standard library", "train_tokens": 9_200_000, "eval_tokens": 480_000,
            "tokenizer": "bytes",
        },
    }  # fmt: skip
    return {**info, **changes}


def summary_of(lines: list[dict[str, Any]], shape: Shape, **changes: Any) -> dict[str, Any]:
    """The content of summary.json for these metrics; the first step warms up."""
    train = [line for line in lines if line["kind"] == "train"]
    steady = train[1:] or train
    evals = [line["loss"] for line in lines if line["kind"] == "eval"]
    step_ms = float(np.median([t["step_ms"] for t in steady]))
    share = {
        p: float(np.median([t["ms"][p]["total"] / t["step_ms"] for t in steady]))
        for p in ("dispatch", "experts", "combine")
    }
    share["rest"] = 1 - sum(share.values())
    summary = {
        "steps": train[-1]["step"],
        "tokens": train[-1]["tokens_seen"],
        "final_loss": train[-1]["loss"],
        "final_eval_loss": evals[-1] if evals else None,
        "first_eval_loss": evals[0] if evals else None,
        "bytes_remote": sum(t["bytes_remote"] for t in train),
        "bytes_remote_alltoall": sum(t["bytes_remote_alltoall"] for t in train),
        "bytes_network": None,
        "copies_per_token": float(np.mean([t["copies_per_token"] for t in train])),
        "num_experts_per_tok": shape.chosen,
        "step_ms_median": step_ms,
        "compare": {
            "transport": "alltoall",
            "step_ms": 449.0,
            "ours_step_ms": 358.0,
            "ratio": 449 / 358,
            "repetitions": 3,
        },
        "ride_share": share["dispatch"] + share["combine"],
        "share": share,
        "exact": True,
        "lossy_reasons": [],
        "tokens_per_second_median": float(np.median([t["tokens_per_second"] for t in steady])),
        "mfu_median": None,
    }
    return {**summary, **changes}


CONFIG = """[model]
num_experts = 16
num_experts_per_tok = 4

[training]
max_steps = 120
learning_rate = 1e-3
report_to = []
"""


def write_lines(run: Path, lines: list[dict[str, Any]]) -> None:
    """Replaces metrics.jsonl."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(run: Path, shape: Shape | None = None, finished: bool = True, sides: bool = True) -> Path:
    """Writes a whole run directory and returns it; `sides`: with held-out losses, samples, checkpoints, probes."""
    shape = shape or Shape()
    run.mkdir(parents=True, exist_ok=True)
    lines = train_lines(shape) + (side_lines(shape) if sides else [])
    order = {"train": 0, "layers": 1}
    lines.sort(key=lambda line: (line["step"], order.get(line["kind"], 2)))
    write_lines(run, lines)
    (run / "run.json").write_text(json.dumps(run_info(shape)))
    (run / "config.toml").write_text(CONFIG)
    if finished:
        (run / "summary.json").write_text(json.dumps(summary_of(lines, shape)))
    return run
