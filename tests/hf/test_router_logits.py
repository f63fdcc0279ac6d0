"""Router logits that are collected: those that models return, with their gradients, compiled and checkpointed too."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import carpool.hf
from carpool.hf.decoder_layers import compile_layers, eagerly
from carpool.hf.routing.router_balance import RouterLogits, balance_loss, find_routers
from tests.hf.parity import EXCEPTIONS
from tests.hf.test_compiled import make
from tests.hf.tiny_models import discover, tiny_model

QUICK = ["olmoe", "minimax", "deepseek_v4", "granitemoe", "qwen3_5_moe"]
CAUSAL = [name for name in sorted(discover().keys() - EXCEPTIONS.keys()) if "CausalLM" in discover()[name].class_name]
IDS = torch.arange(24).reshape(2, 12) % 64


@pytest.mark.parametrize(
    "folder", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CAUSAL]
)
def test_every_model_gives_what_it_returns(folder: str) -> None:
    model: Any = tiny_model(discover()[folder])
    if "output_router_logits" not in inspect.signature(model.forward).parameters:
        return
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
        with RouterLogits(model).collect() as logits:
            model(input_ids=IDS, use_cache=False, output_router_logits=False)
    assert len(logits) == len(expected) == len(find_routers(model)) > 0
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def answer(model: nn.Module, asked: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A balance loss and its gradients: of logits that the model is asked for, or of those that are collected."""
    model.zero_grad(set_to_none=True)
    if asked:
        loss = balance_loss(model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits, 2)
    else:
        with RouterLogits(model).collect() as logits:
            model(input_ids=IDS, use_cache=False)
        loss = balance_loss(logits, 2)
        count = len(logits)
    loss.backward()
    assert asked or len(logits) == count, "what is computed again is collected again"
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["eager", "checkpointed", "compiled", "both"])
def test_the_balance_loss_has_the_same_bits(how: str) -> None:
    model: Any = make("olmoe", num_experts=4, num_experts_per_tok=2).train()
    loss, gradients = answer(model, asked=True)
    assert any("gate" in name for name in gradients)
    if how in ("checkpointed", "both"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if how in ("compiled", "both"):
        compile_layers(model, "aot_eager")
    for _ in range(2):
        ours, found = answer(model, asked=False)
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0.0)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    with eagerly():
        assert torch.equal(answer(model, asked=False)[0], loss)


def test_a_whole_model_that_is_compiled_is_collected_too() -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
        collector, compiled = RouterLogits(model), torch.compile(model, backend="aot_eager")
        with collector.collect() as logits:
            compiled(input_ids=IDS, use_cache=False)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def test_a_model_that_has_no_router_logits() -> None:
    with pytest.raises(ValueError, match="which modules of Linear make router logits"):
        RouterLogits(nn.Linear(2, 2))
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    assert carpool.hf.rides(model)
    with pytest.raises(RuntimeError, match="has 3 routers, but a forward made 0"), RouterLogits(model).collect():
        pass
