"""Sizes that cannot be meant are refused by name; those of published models are not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from carpool.hf.weights.model_config import check_sizes, make_config
from carpool.train.config import load_config
from carpool.train.plan.dry_run import dry_run

PUBLISHED = (
    "olmoe", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
    "jamba", "phimoe", "nemotron_h", "hunyuan_v1_moe", "minimax", "ernie4_5_moe", "aria_text", "doge", "lfm2_moe",
)  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_sizes_are_taken(model_type: str) -> None:
    check_sizes(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("model_type", "sizes", "says"),
    [
        ("olmoe", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0 in the olmoe configuration must be at least 1"),
        ("olmoe", {"num_experts_per_tok": 17, "num_experts": 16}, "= 17 .* is more than its num_experts = 16"),
        ("olmoe", {"num_experts": 2, "num_experts_per_tok": 4}, "= 4 .* is more than its num_experts = 2"),
        ("olmoe", {"num_experts": -4}, "num_experts = -4 .* must be at least 1"),
        ("olmoe", {"hidden_size": 33, "num_attention_heads": 4}, "hidden_size = 33 .* no multiple of its num_attent"),
        ("olmoe", {"num_attention_heads": 4, "num_key_value_heads": 3}, "= 4 .* multiple of its num_key_value_heads"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok = 2 .* more than its num_(local_)?experts = 1"),
        ("deepseek_v3", {"n_routed_experts": 4}, "num_experts_per_tok = 8 .* more than its n\\w+ = 4"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_meant(model_type: str, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_config(model_type, sizes)


def test_a_head_may_have_a_size_of_its_own() -> None:
    """As Glm-4.5 has them; the key is in its config.json, not in the class."""
    check_sizes(CONFIG_MAPPING["glm4_moe"](head_dim=128))
    with pytest.raises(ValueError, match="hidden_size = 4096"):
        check_sizes(CONFIG_MAPPING["glm4_moe"]())


def test_the_command_line_says_it_before_anything_starts() -> None:
    config = load_config(None, ["model.config.num_experts_per_tok=17", "parallelism.device=cpu"])
    with pytest.raises(ValueError, match=r"num_experts_per_tok = 17 .* is more than its num_experts = 16"):
        dry_run(config)
