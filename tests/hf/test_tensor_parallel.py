"""Tensor parallelism over every model: it either computes, or is refused before anything is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.train.config import load_config
from carpool.train.launch.machine import imagine_machine
from carpool.train.plan.start_checks import foresee
from tests.hf.fake_ranks import PASSED, REFUSED

# What fails inside and is not refused, and why.
FAILS = {
    "diffusion_gemma": "its decoder has no rule in the plan and reads the encoder's keys, which are in shards; no run "
    "trains it, because it is no causal language model",
}
ONE_KEY_HEAD = ["model.config.num_attention_heads=4", "model.config.num_key_value_heads=1"]


@pytest.mark.parametrize(
    ("tp", "key_heads"),
    [(2, 1), (4, 4), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_every_model_computes_or_is_refused(tp: int, key_heads: int) -> None:
    command = [sys.executable, "-m", "tests.hf.fake_ranks", str(tp), str(key_heads)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=root)
    found = json.loads(ran.stdout.splitlines()[-1])
    failed = {folder: how for folder, how in found.items() if how != PASSED and not how.startswith(REFUSED)}
    assert failed.keys() <= FAILS.keys(), failed
    assert sum(how == PASSED for how in found.values()) > 30
    if key_heads < tp:
        for folder in ("mixtral", "glm4_moe", "qwen2_moe"):
            assert f"tp_size = {tp} does not divide the {key_heads} key-value heads" in found[folder]


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "qwen2_moe"])
def test_heads_that_ranks_do_not_divide_are_refused_before_a_run(model_type: str) -> None:
    sizes = ["hidden_size=32", "num_hidden_layers=2", "num_experts_per_tok=2", "head_dim=8"]
    config = load_config(
        None,
        [
            f"model.config.model_type={model_type}", *(f"model.config.{one}" for one in sizes), *ONE_KEY_HEAD,
            "parallelism.num_ranks=4", "parallelism.tp_size=2", "parallelism.device=cpu",
        ],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"tp_size = 2 does not divide the 1 key-value heads .* tp_size can be 1 "):
        foresee(config, [], imagine_machine(config, None))


def test_a_tied_vocabulary_that_ranks_do_not_divide_is_refused_before_a_run() -> None:
    config = load_config(
        None,
        ["model.config.vocab_size=1001", "model.config.tie_word_embeddings=true", "parallelism.data_parallel=fsdp",
         "parallelism.num_ranks=4", "parallelism.device=cpu", "data.tokenizer=bytes"],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"is tied, and FSDP cannot shard its \d+ rows evenly over 4 ranks"):
        foresee(config, [], imagine_machine(config, None))
