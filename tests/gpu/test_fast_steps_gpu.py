"""A Trainer's script on one GPU, eager and with `FastSteps`: the same losses, sooner."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.trainer_steps import measure
from tests.gpu.ranks import needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400), needs(1)]
KEYS = (
    '{"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 256, "num_attention_heads": 8, '
    '"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096}'
)


@pytest.mark.parametrize(("trainer", "accumulation", "again"), [("transformers", 2, False), ("trl", 1, True)])
def test_fast_steps_learn_the_same_sooner(
    trainer: str, accumulation: int, again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        model="qwen3-30b-a3b", layers=10, keys=KEYS, tokens=1024, steps=12, rank=16, trainer=trainer,
        accumulation=accumulation, logging=1, checkpointing=again,
    )  # fmt: skip
    eager, captured, fast = (measure(way, args, torch.device("cuda")) for way in ("eager", "captured", "fast"))
    assert "no CUDA graphs" not in capsys.readouterr().out
    assert captured["losses"] == pytest.approx(eager["losses"], rel=2e-4)
    assert fast["losses"] == pytest.approx(eager["losses"], rel=5e-3)
    assert fast["ms"] < captured["ms"] < eager["ms"] and fast["ms"] < 0.6 * eager["ms"]
