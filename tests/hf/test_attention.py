"""Which attention a model takes, where nobody says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GptOssForCausalLM, Qwen3MoeForCausalLM

from carpool.hf.documents import FLEX, attention_of_any_length, fused_attention
from carpool.parallel.degrees import Degrees
from carpool.train.blueprint import attention_of
from carpool.train.config import load_config


def test_models_with_sinks_take_flex_attention() -> None:
    assert fused_attention(GptOssForCausalLM) == FLEX and fused_attention(Qwen3MoeForCausalLM) is None


@pytest.mark.parametrize(
    ("overrides", "cuda", "cp", "expected"),
    [
        ([], True, 1, FLEX),
        ([], False, 1, None),
        ([], True, 2, None),
        (["data.packing=examples"], True, 1, None),
        (["training.full_determinism=true"], True, 1, None),
        (["model.attn_implementation=eager"], True, 1, "eager"),
    ],
)
def test_where_it_was_shown_to_be_right(overrides: list[str], cuda: bool, cp: int, expected: str | None) -> None:
    model: Any = GptOssForCausalLM
    assert attention_of(load_config(None, overrides), Degrees(cp=cp), model, cuda) == expected


@pytest.mark.parametrize(("taken", "inside"), [(FLEX, "eager"), ("sdpa", "sdpa")])
def test_token_by_token_nothing_is_compiled(taken: str, inside: str) -> None:
    text = SimpleNamespace(_attn_implementation=taken)
    with attention_of_any_length(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))):
        assert text._attn_implementation == inside
    assert text._attn_implementation == taken
