"""A family in one file outside the package trains, whole and in stages, and is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.families import FAMILIES, Family, family, register
from carpool.hf.weights.model_config import make_config
from carpool.planner.model.shape import ModelShape
from tests.plugins.outside import train_with
from tests.ranks import Ranks
from tests.train.test_loop import losses

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts": 8,
}  # fmt: skip


def test_it_trains(two_ranks: Ranks, tmp_path: Path, text: list[str]) -> None:
    """The output layer computes the loss that the model's own logits have, alone and as the last of two stages; the
    router is found by its name."""
    own, ours, stages, limited = (tmp_path / name for name in ("own", "ours", "stages", "limited"))
    few = [*text, "model.model_type=loud", "training.max_steps=2", "training.save_steps=2", "training.eval_steps=none"]
    assert two_ranks(train_with, "loud", str(own), [*few, "training.loss_chunk_size=0"]) == [""] * 2
    assert two_ranks(train_with, "loud", str(ours), few) == [""] * 2
    assert losses(ours) == {step: pytest.approx(value, rel=1e-5) for step, value in losses(own).items()}
    in_stages = ["parallelism.pp_size=2", "parallelism.ep_size=1", "training.gradient_accumulation_steps=2"]
    assert two_ranks(train_with, "loud", str(stages), [*few, *in_stages]) == [""] * 2
    assert losses(stages)[1] == pytest.approx(losses(own)[1], rel=1e-4)
    assert (
        two_ranks(train_with, "loud", str(limited), [*few, "moe.limit_ranks=1", "moe.router_float32=true"]) == [""] * 2
    )


def test_its_keys_are_known_to_configurations_and_plans(loud: Any) -> None:
    config = make_config("loud", {**SIZES, "experts_each": 3, "loudness": 0.5})
    assert (config.num_experts_per_tok, config.loudness) == (3, 0.5)
    with pytest.raises(ValueError, match=r"has no key 'loudnes'; did you mean 'loudness'"):
        make_config("loud", {"loudnes": 1.0})
    with pytest.raises(ValueError, match=r"experts_each = 9 .* is more than its num_experts = 8"):
        make_config("loud", {**SIZES, "experts_each": 9})
    keys = {**SIZES, "vocab_size": 64}
    shape = ModelShape.read({**keys, "model_type": "loud", "experts_each": 3})
    olmoe = ModelShape.read({**keys, "model_type": "olmoe", "num_experts_per_tok": 3})
    assert shape.top_k == 3 and shape.layers == olmoe.layers


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(ValueError, match="'olmoe' is registered already"):
        register(Family("olmoe"))
    with pytest.raises(ValueError, match=r"must be a carpool\.families.Family of that name"):
        FAMILIES.register({"router": "Gate"}, "mine")  # type: ignore[arg-type]
    assert family("nobody has it") == Family("")
