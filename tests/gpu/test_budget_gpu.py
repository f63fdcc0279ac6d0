"""A memory budget on GPUs: what policies cost is measured over the real transport, and nothing of it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "model.config=qwen3-30b-a3b", "model.config.num_hidden_layers=6", "model.config.num_experts=16",
    "model.config.hidden_size=1024", "model.dtype=bfloat16", "data.tokenizer=bytes", "data.sequence_length=2048",
    "training.per_device_train_batch_size=2", "training.max_steps=3", "training.eval_on_start=false",
    "training.save_pretrained=false", "training.save_steps=none", "training.sample_prompt=none",
    "parallelism.num_ranks=2", "data.eval_max_sequences=4", "training.per_device_eval_batch_size=2",
    "training.full_determinism=true",
    # By itself a run within a budget would divide dense parameters first, and have nothing left to choose.
    "parallelism.dense=replicate",
]  # fmt: skip


def run(output: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run.json, lines of steps)."""
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return json.loads((output / "run.json").read_text()), [line for line in lines if line["kind"] == "train"]


def test_a_budget_is_kept_by_what_was_measured(tmp_path: Path) -> None:
    info, plain = run(tmp_path / "plain")
    total = info["predicted"]["memory_per_rank_bytes"]["total"]
    info, steps = run(tmp_path / "budget", f"memory.budget={int(0.9 * total)}B", "training.check_memory=false")
    assert info["decisions"]["memory"]["how"] == "measured"
    # A layer that is computed again takes longer. (Its activations alone may take too little to be measured.)
    assert info["decisions"]["memory"]["milliseconds"]["dense"]["recompute"] > 0
    assert info["predicted"]["memory_per_rank_bytes"]["total"] <= 0.9 * total
    # The same bits, in less memory; the measurement before it has given all back.
    assert [one["loss"] for one in steps] == [one["loss"] for one in plain]
    assert steps[-1]["memory_peak_bytes"] < plain[-1]["memory_peak_bytes"]
