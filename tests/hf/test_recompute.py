"""Which models draw random numbers, so that layers that are computed again must note their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig

from carpool.hf import install, rides
from carpool.hf.decoder_layers import draws_random_numbers, recompute_layers
from carpool.routing.routing import DropOptions

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "experts_implementation": "eager",
}  # fmt: skip


def olmoe(**more: Any) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(OlmoeConfig(num_experts=4, **SIZES, **more))
    install(model)
    return model.train()


def test_nothing_random_in_a_model_without_drop_out() -> None:
    assert not draws_random_numbers(olmoe())


@pytest.mark.parametrize("what", ["attention", "module", "jitter", "second choices"])
def test_what_is_random_is_found(what: str) -> None:
    if what == "jitter":
        config = MixtralConfig(num_local_experts=4, router_jitter_noise=0.1, **SIZES)
        model: Any = AutoModelForCausalLM.from_config(config)
    else:
        model = olmoe(attention_dropout=0.1 if what == "attention" else 0.0)
    if what == "module":
        model.extra = torch.nn.Dropout(0.1)
    if what == "second choices":
        next(iter(rides(model).values())).set_drops(DropOptions(random_second=True))
    assert draws_random_numbers(model)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("ride_again", [False, True])
def test_gradients_are_those_of_layers_that_are_kept(dropout: float, ride_again: bool) -> None:
    model, tokens = olmoe(attention_dropout=dropout), torch.arange(16).view(2, 8)
    found = []
    for again in (False, True):
        if again:
            recompute_layers(model, ride_again)
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
