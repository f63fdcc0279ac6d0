"""Training that limits routing, drops tokens or freezes parameters: it says so, keeps to it, learns, and resumes to the
same bits. And losses of routers; their gradients on meshes: tests/meshes."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils.output_capturing import OutputRecorder

from carpool.families import family
from carpool.hf.routing.router_balance import router_scores
from carpool.layout.topology import Topology
from carpool.parallel.degrees import Degrees
from carpool.recipes import path_of
from carpool.train.config import load_config
from carpool.train.config.schema import MoeSection
from carpool.train.plan.resolve import _check_model_has
from carpool.train.run.run import train
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import MODEL, goes_on, losses, records, start, start_two, weights

LIMITED = ["moe.limit_ranks=1", "training.freeze=non_expert", "training.eval_steps=none"]


def test_limited_and_frozen(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(two_ranks, whole, [*text, *LIMITED]) == [""] * 2
    info = json.loads((whole / "run.json").read_text())
    assert not info["exact"]
    assert info["lossy_reasons"] == ["each token's experts are limited to 1 rank, by score"]
    lines = records(whole)
    assert all(line["copies_per_token"] <= 1 for line in lines.values())
    assert lines[6]["loss"] < lines[1]["loss"]

    before, after = weights(whole, 3), weights(whole, 6)
    moved = {name for name in before if name.startswith("model/") and not torch.equal(before[name], after[name])}
    assert moved and all(".experts." in name or ".mlp.gate." in name for name in moved)
    assert any(".mlp.gate." in name for name in moved)

    goes_on(two_ranks, whole, parts, [*MODEL, *text, *LIMITED], 3)


def test_limits_of_the_configuration() -> None:
    config = load_config(None, ["moe.limit_nodes=1", "moe.limit_by=groups"])
    options = config.moe.limits(Topology.even(4, 2))
    assert (options.limit_nodes, options.num_nodes, options.limit_by) == (1, 2, "groups")
    assert not MoeSection().limits(Topology.even(4)).active(4)
    uneven, by_node = Topology((0, 0, 0, 1), (0, 0, 0, 1), "GROUP_RANK"), MoeSection(limit_nodes=1)
    MoeSection(limit_ranks=1).limits(uneven).check(4)  # nobody asks for nodes
    with pytest.raises(ValueError, match=r"by GROUP_RANK its nodes hold ranks 0, 1, 2; ranks 3: start equally many"):
        by_node.limits(uneven).check(4)
    assert by_node.limits(Topology.even(4, 2)).num_nodes == 2


def test_ranks_per_node_reach_the_limit(ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """Four ranks of one machine, taken for two nodes of two: a limit to one node keeps every token on two ranks."""
    settings = ["moe.limit_nodes=1", "parallelism.ranks_per_node=2", "training.max_steps=1", "training.eval_steps=none"]
    settings += ["training.warmup_steps=0", "training.stop_at_step=1", "training.eval_on_start=false"]
    assert start(ranks, tmp_path / "run", [*text, *settings]) == [""] * 4
    assert json.loads((tmp_path / "run" / "run.json").read_text())["lossy_reasons"] == [
        "each token's experts are limited to 1 node, by score"
    ]
    step = records(tmp_path / "run")[1]
    assert step["copies_per_token"] <= 2
    assert 0 < step["bytes_network"] < step["bytes_remote"] and step["bytes_network_seen"] == step["bytes_network"]


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


# What a router does by its configuration, or what is no score: a choice by hashes, a sampler.
BY_CONFIG = {"cohere2_moe": "softmax", "inkling2": "sigmoid", "deepseek_v4": "sqrtsoftplus", "phimoe": "softmax"}
LOSSES = ["moe.balance_batch=global", "moe.router_z_loss_coef=0.01", "moe.sequence_aux_loss_coef=0.02"]


def test_scores_of_routers_are_what_families_say() -> None:
    wrong = []
    for folder in sorted(set(discover()) - set(BY_CONFIG)):
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        recorders = [
            (getattr(cls, "_can_record_outputs", None) or {}).get("router_logits") for cls in vars(module).values()
        ]
        routers = {one.target_class for one in recorders if isinstance(one, OutputRecorder) and one.target_class}
        sources = [inspect.getsource(cls) for cls in routers]
        if sources and family(folder).sigmoid_router != any(
            ".sigmoid(" in one or 'ACT2FN["sigmoid"]' in one for one in sources
        ):
            wrong.append(folder)
    assert not wrong
    for folder, expected in BY_CONFIG.items():
        assert router_scores(tiny_model(discover()[folder])) == expected


def test_a_run_records_them(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    settings = [*text, *LOSSES, "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    whole = tmp_path / "whole"
    assert start_two(two_ranks, whole, settings) == [""] * 2
    first, last = records(whole)[1], records(whole)[6]
    # Of 8 experts, uniform logits near 0 have (log 8)^2; balanced choices have 1, and a balance loss of K = 3.
    assert first["z_loss"] == pytest.approx(4.32, rel=0.1) and last["z_loss"] < first["z_loss"] + 0.5
    assert 1 < first["sequence_aux_loss"] < 1.5 and 3 < first["aux_loss"] < 4


def test_what_cannot_be_is_refused() -> None:
    model = tiny_model(discover()["deepseek_v4"])
    blueprint: Any = SimpleNamespace(model=model, expert_counts={}, top_k=2, balance_loss=lambda weight: (0.0, ""))
    with pytest.raises(ValueError, match="have sqrtsoftplus: set it to 0"):
        _check_model_has(load_config(None, ["moe.sequence_aux_loss_coef=0.1"]), blueprint, Degrees())
