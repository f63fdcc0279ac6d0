"""Losses of routers in a run, and which families' scores are sigmoids. Their gradients on meshes: tests/meshes."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.output_capturing import OutputRecorder

from carpool.families import family
from carpool.hf.routing.router_balance import router_scores
from carpool.parallel.degrees import Degrees
from carpool.train.config import load_config
from carpool.train.plan.resolve import _check_model_has
from tests.hf.tiny_models import discover, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import records, start_two

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
