"""Two stages on two GPUs: the losses of one stage on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.ranks import needs, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560), needs(2)]
SETTINGS = [
    "training.max_steps=6", "training.logging_steps=1", "training.eval_steps=3", "training.save_pretrained=false",
    "training.sample_prompt=none", "model.config.num_hidden_layers=4", "training.gradient_accumulation_steps=4",
    # 1F1B has embedding and head on two ranks.
    "model.config.tie_word_embeddings=false",
]  # fmt: skip


def losses(output: Path, ranks: int, *overrides: str) -> list[float]:
    settings = [*SETTINGS, f"parallelism.num_ranks={ranks}", f"training.output_dir={output}", *overrides]
    torchrun(ranks, "carpool.cli", "train", *settings, seconds=240)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.parametrize("bf16", ["false", "true"])
def test_stages_learn_what_the_whole_model_learns(tmp_path: Path, bf16: str) -> None:
    whole = losses(tmp_path / "whole", 1, f"training.bf16={bf16}")
    for schedule in ("1F1B", "DualPipeV"):
        cut = [f"training.bf16={bf16}", "parallelism.pp_size=2", f"parallelism.pp_schedule={schedule}"]
        assert losses(tmp_path / schedule, 2, *cut) == pytest.approx(whole, rel=5e-3 if bf16 == "true" else 1e-4)


@needs(4)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_rides_inside_of_stages(tmp_path: Path, schedule: str) -> None:
    """Over nvlink: their buffers are one stage's, and what they keep is freed in another order than it was made."""
    cut = ["parallelism.pp_size=2", "parallelism.ep_size=2", f"parallelism.pp_schedule={schedule}"]
    ways = {name: losses(tmp_path / name, 4, *cut, f"moe.transport={name}") for name in ("alltoall", "nvlink")}
    assert ways["nvlink"] == pytest.approx(ways["alltoall"], rel=5e-3)
