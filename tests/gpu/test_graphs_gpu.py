"""Steps that are captured as CUDA graphs, on two ranks: bit by bit those of an eager run, whatever is in the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=9", "training.eval_steps=5", "training.save_pretrained=false", "training.save_steps=none",
    "training.sample_tokens=4", "parallelism.num_ranks=2", "parallelism.dense=replicate",
    "training.full_determinism=true", "model.dtype=bfloat16", "parallelism.timeout_seconds=120",
    "data.eval_max_sequences=16",
]  # fmt: skip
COUNTED = ("loss", "grad_norm", "bytes_remote", "copies_per_token", "load_max_over_mean", "router_entropy")


def lines(output: Path, *overrides: str) -> list[dict[str, Any]]:
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.gradient_accumulation_steps=3", "moe.router_aux_loss_coef=0.02"),
        ("training.torch_compile=true", "training.gradient_accumulation_steps=2"),
        ("moe.schedule=chunks", "moe.chunks=2"),
        ("memory.dense=recompute", "memory.hidden=recompute"),
        ("memory.dense=recompute", "training.torch_compile=true"),
        ("memory.dense=offload", "memory.rows=offload", "memory.hidden=offload"),
        ("training.gradients=consumed", "training.clip_by=previous", "training.optimizer_moments=int8"),
        ("training.gradients=consumed", "training.max_grad_norm=0", "nvlink.capacity=0.125"),
        ("memory.rows=offload", "memory.hidden=offload", "nvlink.capacity=0.125", "training.learning_rate=0.02"),
        # Slabs of an eighth: some step overflows, is repeated eagerly, and captured anew.
        ("nvlink.capacity=0.125", "training.learning_rate=0.02"),
    ],
    ids=[
        "plain",
        "accumulated",
        "compiled",
        "chunks",
        "recomputed",
        "recomputed compiled",
        "offloaded",
        "consumed",
        "consumed overflow",
        "offloaded overflow",
        "overflow",
    ],
)
def test_a_captured_run_is_an_eager_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    eager = lines(tmp_path / "eager", *overrides, "training.cuda_graphs=off")
    captured = lines(tmp_path / "captured", *overrides, "training.cuda_graphs=on")
    kinds = ("train", "eval", "repeat")
    assert [line["kind"] for line in captured if line["kind"] in kinds] == [
        line["kind"] for line in eager if line["kind"] in kinds
    ]
    for one, other in zip(eager, captured, strict=True):
        if one["kind"] in ("train", "eval"):
            assert {key: one.get(key) for key in COUNTED} == {key: other.get(key) for key in COUNTED}, one["step"]
        if one["kind"] == "train":
            # Times of rides come from events in the graph.
            assert all(other["ms"][span]["total"] > 0 for span in ("dispatch", "experts", "combine"))
