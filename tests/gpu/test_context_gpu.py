"""Ranks that share sequences on GPUs: the losses of ranks with whole ones, captured steps, and longer sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.save_steps=none", "training.sample_tokens=4", "parallelism.num_ranks=2", "data.eval_max_sequences=16",
    "parallelism.timeout_seconds=120",
]  # fmt: skip
SHARED = ["parallelism.cp_size=2"]


def lines(output: Path, *overrides: str, kinds: tuple[str, ...] = ("train", "eval")) -> list[dict[str, Any]]:
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] in kinds]


@pytest.mark.parametrize("dense", ["fsdp", "replicate"])
@pytest.mark.parametrize(
    ("way", "bf16", "error"), [("ulysses", "false", 2e-4), ("ulysses", "true", 5e-3), ("ring", "true", 5e-3)]
)
def test_a_run_learns_what_ranks_with_whole_sequences_learn(
    tmp_path: Path, dense: str, way: str, bf16: str, error: float
) -> None:
    common = [f"parallelism.dense={dense}", f"training.bf16={bf16}"]
    whole = lines(tmp_path / "whole", *common, "training.per_device_train_batch_size=2")
    parts = lines(
        tmp_path / "parts",
        *common,
        *SHARED,
        "training.per_device_train_batch_size=4",
        f"parallelism.cp_attention={way}",
    )
    assert [line["tokens"] for line in parts] == [line["tokens"] for line in whole]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], rel=error)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_a_captured_run_is_an_eager_one(tmp_path: Path, way: str) -> None:
    common = [*SHARED, f"parallelism.cp_attention={way}", "parallelism.dense=replicate", "model.dtype=bfloat16"]
    eager, captured = (
        lines(tmp_path / graphs, *common, f"training.cuda_graphs={graphs}", "training.full_determinism=true")
        for graphs in ("off", "on")
    )
    assert [(line["loss"], line.get("grad_norm")) for line in captured] == [
        (line["loss"], line.get("grad_norm")) for line in eager
    ]


def test_longer_sequences_take_less_memory(tmp_path: Path) -> None:
    long = ["data.sequence_length=16384", "training.max_steps=2", "training.eval_steps=none", "model.dtype=bfloat16"]
    whole = lines(tmp_path / "whole", *long, "training.per_device_train_batch_size=1", kinds=("train",))
    parts = lines(tmp_path / "parts", *long, *SHARED, "training.per_device_train_batch_size=2", kinds=("train",))
    assert parts[0]["loss"] == pytest.approx(whole[0]["loss"], rel=5e-3)
    # As many tokens a rank, of twice as many sequences.
    assert parts[-1]["memory_peak_bytes"] < 1.3 * whole[-1]["memory_peak_bytes"]
    twice = lines(tmp_path / "twice", *long, *SHARED, "training.per_device_train_batch_size=1", kinds=("train",))
    assert twice[-1]["memory_peak_bytes"] < 0.8 * whole[-1]["memory_peak_bytes"]
