"""Random weights in the shapes of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tools.random_checkpoint import SHARD_GB, plan, write

# total_size, number of tensors and files of the published model.safetensors.index.json.
PUBLISHED = {"qwen3-30b-a3b": (61_064_245_248, 18_867, 16), "olmoe-1b-7b": (13_838_323_712, 3_219, 3)}


@pytest.mark.parametrize("name", ["olmoe-1b-7b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.slow)])
def test_sizes_and_files_are_the_published_ones(name: str) -> None:
    config, layout = plan(name, None, SHARD_GB[name])
    tensors = {name: entry for file in layout.files.values() for name, entry in file.items()}
    assert (layout.bytes, len(tensors), len(layout.files)) == PUBLISHED[name]
    assert {entry.dtype for entry in tensors.values()} == {torch.bfloat16}
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp.experts.{config.num_experts - 1}.down_proj.weight"
    assert tensors[last].shape == (
        config.hidden_size,
        getattr(config, "moe_intermediate_size", config.intermediate_size),
    )


def test_a_cut_loads_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "vocab_size": 64,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        config, layout = plan({"from": "qwen3-30b-a3b", **sizes}, 2, 2e-5)
        write(tmp_path / folder, config, layout, seed, lambda _: None)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "model.safetensors.index.json", *layout.files}
    weights = {folder: load_file(tmp_path / folder / next(iter(layout.files))) for folder in "abc"}
    assert all(torch.equal(weights["b"][name], value) for name, value in weights["a"].items())
    assert not all(torch.equal(weights["c"][name], value) for name, value in weights["a"].items())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto", output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    assert model.model.norm.weight.eq(1).all() and 0.018 < model.lm_head.weight.float().std() < 0.022
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_hidden_layers"] == 2
    with pytest.raises(FileExistsError, match="is not empty"):
        write(tmp_path / "a", config, layout, 0, lambda _: None)
