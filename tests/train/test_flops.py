"""Operations of a step by hand, and the sizes of heads that they rest on."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.model_config import head_sizes
from carpool.train.blueprint import Blueprint, ModelSize, flops_per_token, model_config, model_size, top_k_of
from carpool.train.config import load_config
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.lora import trained_of


def _size(config: PreTrainedConfig) -> ModelSize:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model_size(model, experts_modules(model), top_k_of(model))


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("qwen3-30b-a3b", (128, 128)),
        ("glm-4.5-air", (128, 128)),
        ("olmoe-1b-7b", (128, 128)),
        ("mixtral-8x7b", (128, 128)),
        ("gpt-oss-20b", (64, 64)),
        ("qwen3-next-80b-a3b", (256, 256)),
        ("deepseek-v3", (192, 128)),
        ("kimi-linear-48b-a3b", (192, 128)),
    ],
)
def test_sizes_of_heads(name: str, heads: tuple[int, int]) -> None:
    assert head_sizes(model_config(name)) == heads


def test_operations_of_qwen3_30b_a3b() -> None:
    """By hand: 48 layers of 32 heads of 128; a token meets 8 of 128 experts of three matrices 2048 x 768."""
    size = _size(model_config("qwen3-30b-a3b"))
    attention = 2048 * 128 * (32 + 2 * 4 + 32)
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768 + 2 * 2048 + 2 * 128
    assert size.multiplied == 48 * layer + 2048 + 151_936 * 2048
    assert (size.attention, size.windowed) == (48 * 32 * 128, 0)
    assert flops_per_token(size, 4096) == 6 * size.multiplied + 6 * 4096 * 48 * 32 * 128


@pytest.mark.parametrize("length", [7, 128, 129, 4096])
def test_a_window_is_a_band_of_the_score_matrix(length: int) -> None:
    """gpt-oss: half of 24 layers see 128 tokens. Token i sees i of a sequence (its own half), at most the window."""
    size = _size(model_config("gpt-oss-20b"))
    assert size.attention == size.windowed == 12 * 64 * 64 and size.window == 128
    step = torch.arange(length * 4, dtype=torch.float64) / 4
    full, band = step.mean(), step.clamp(max=128).mean()
    expected = 6 * size.multiplied + 12 * 12 * 64 * 64 * (full + band)
    assert flops_per_token(size, length) == pytest.approx(expected.item(), rel=1e-3)


def test_linear_attention_has_no_score_matrix() -> None:
    assert _size(model_config("qwen3-next-80b-a3b")).attention == 12 * 16 * 256
    assert _size(model_config("kimi-linear-48b-a3b")).attention == 7 * 32 * (192 + 128) // 2


def test_what_is_frozen_has_no_gradient_of_its_own() -> None:
    """By hand. lm_head is trained itself; an embedding's rows are looked up, and multiply nothing."""
    for saved, multiplied, more in (((), 0, 0), (("lm_head",), 1, 1), (("embed_tokens",), 0, 1)):
        settings = ["model.config=qwen3-30b-a3b", "adapter.kind=lora", f"adapter.modules_to_save={list(saved)}"]
        config = load_config(None, settings)
        blueprint = Blueprint.of_config(config, tokenizer_of(config))
        words = 2048 * blueprint.vocab_size
        trained = trained_of(blueprint, config)
        attention = 48 * 16 * (2048 * 4 + 128 * (32 + 2 * 4 + 32))
        assert trained.adapters == attention and trained.expert_adapters == 48 * 8 * 16 * (2048 + 1536 + 768 + 2048)
        assert trained.frozen == blueprint.size.multiplied - blueprint.size.visited - multiplied * words
        assert trained.updated == attention + 16 * trained.expert_adapters + more * words
        assert trained.frozen_experts == blueprint.size.visited
