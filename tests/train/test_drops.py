"""Training as the recipes `gshard` and `switch` say: it drops, says so, learns, and resumes to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.recipes import path_of
from carpool.train.config import load_config
from carpool.train.run.run import train
from carpool_systems.mechanisms import load
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, losses, records

# Drops counted, of choices: those beyond capacity, and for GShard second ones at random.
RECIPES = {"gshard": 2, "switch": 1}


def follow(name: str, output: str, overrides: list[str]) -> None:
    train(load_config(path_of(name), [*overrides, f"training.output_dir={output}"]), command="test")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n != "gshard" else n for n in RECIPES])
def test_training_by_a_recipe_that_drops(two_ranks: Ranks, text: list[str], tmp_path: Path, name: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    own = ("model.config.num_experts_per_tok", "model.config.router_aux_loss_coef")
    overrides = [*text, *(one for one in MODEL if not one.startswith(own))]
    two_ranks(follow, name, str(whole), overrides)
    info, lines = json.loads((whole / "run.json").read_text()), records(whole)
    assert info["lossy_reasons"] == load_config(path_of(name), []).moe.drops.lossy_reasons != []
    # 2 ranks with 2 sequences of 32 tokens each, in 2 layers.
    choices = 2 * 2 * 32 * 2 * RECIPES[name]
    assert all(0 < line["dropped_tokens"] < choices for line in lines.values())
    assert lines[6]["loss"] < lines[1]["loss"]
    resume = f"training.resume_from_checkpoint={whole}/checkpoints/step-00000003"
    two_ranks(follow, name, str(parts), [*overrides, resume])
    assert losses(parts) == {step: losses(whole)[step] for step in (4, 5, 6)}


def test_the_recipes_load() -> None:
    assert {load(name).name for name in RECIPES} == set(RECIPES)
