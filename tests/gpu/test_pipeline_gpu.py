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


EXACT = ["model.dtype=bfloat16", "training.full_determinism=true", "parallelism.pp_size=2"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=needs(4))])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_captured_stages_are_eager_ones(tmp_path: Path, schedule: str, ranks: int) -> None:
    """From the third step on each forward and backward of a stage is a graph; rides over nvlink are in it."""
    cut = [*EXACT, f"parallelism.pp_schedule={schedule}", f"parallelism.ep_size={ranks // 2}"]
    cut += ["parallelism.dense=replicate"] if ranks == 4 else []
    ways = [losses(tmp_path / way, ranks, *cut, f"training.cuda_graphs={way}") for way in ("off", "auto")]
    assert ways[0] == ways[1]
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["decisions"]["cuda_graphs"]["used"]


@needs(4)
@pytest.mark.parametrize("schedule", ["DualPipeV", "Interleaved1F1B"])
@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_pairs_at_the_same_time(tmp_path: Path, transport: str, schedule: str) -> None:
    """The rides of one micro-batch beside the computation of another: the same bits."""
    cut = [*EXACT, f"parallelism.pp_schedule={schedule}", "parallelism.ep_size=2", f"moe.transport={transport}"]
    ways = [losses(tmp_path / way, 4, *cut, f"moe.schedule={way}") for way in ("none", "two-batch")]
    assert ways[0] == ways[1]
