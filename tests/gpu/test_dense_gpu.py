"""Whole dense parameters on GPUs: the same losses as under FSDP2, stored in either dtype, and no call that waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.sample_tokens=4", "parallelism.num_ranks=2", "training.gradient_accumulation_steps=2",
]  # fmt: skip


def losses(output: Path, *overrides: str) -> list[float]:
    torchrun(2, "carpool.cli", "train", *SETTINGS, f"training.output_dir={output}", *overrides, seconds=240)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=float32"],
        ["model.dtype=bfloat16"],
        ["model.dtype=bfloat16", "training.torch_compile=true", "memory.dense=recompute"],
    ],
    ids=str,
)
def test_a_run_learns_what_it_learns_under_fsdp(tmp_path: Path, settings: list[str]) -> None:
    runs = {dense: losses(tmp_path / dense, f"parallelism.dense={dense}", *settings) for dense in ("fsdp", "replicate")}
    # bf16: gradients are rounded at other places.
    assert runs["replicate"] == pytest.approx(runs["fsdp"], rel=5e-3)


def test_steps_are_exact_and_nothing_waits() -> None:
    torchrun(2, "tests.gpu.dense_worker", "steps", seconds=180)
