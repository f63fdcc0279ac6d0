"""`compile_layers`: the same losses and gradients, layers that are found, errors that say what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import carpool.hf
from carpool.hf.build_model import build_model
from carpool.hf.decoder_layers import compile_layers, eagerly, recompute_layers, shards_inside
from carpool.hf.routing.router_balance import RouterLogits, balance_loss, traced_logits
from carpool.hf.seam.find_modules import decoder_layers
from carpool.hf.sharding import keep_experts
from carpool.hf.weights.model_config import make_config
from carpool.optim.clip import grad_norm
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import replicated, sharded_parameters
from carpool.train.plan.division import distributed_config
from tests.ranks import Ranks

SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


def make(kind: str, **more: object) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
    carpool.hf.install(model)
    return model


def answer(model: nn.Module, router_logits: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    tokens = torch.arange(24).reshape(2, 12) % 64
    loss = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=router_logits).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_compiled_layers_give_the_same_loss_and_gradients() -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    loss, gradients = answer(model)
    assert compile_layers(model, "aot_eager") == 3
    compiled, ours = answer(model)
    torch.testing.assert_close(compiled, loss, rtol=1e-6, atol=0.0)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    with eagerly():
        again, theirs = answer(model)
    assert torch.equal(again, loss) and all(torch.equal(theirs[name], g) for name, g in gradients.items())


@pytest.mark.parametrize("ride_again", [False, True])
def test_layers_that_are_computed_again_are_compiled_too(ride_again: bool) -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2).train()
    loss, gradients = answer(model, router_logits=False)
    recompute_layers(model, ride_again)
    torch._dynamo.reset()
    compile_layers(model, "aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with RouterLogits(model).collect() as logits:
        compiled, ours = answer(model, router_logits=False)
    assert len(logits) == 3
    # Once for all layers.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    torch.testing.assert_close(compiled, loss, rtol=1e-6, atol=0.0)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_no_step_outlives_a_layer_that_is_computed_again() -> None:
    """Its checkpoint leaves the layer before its end, with what routers made."""
    model = make("olmoe", num_experts=4, num_experts_per_tok=2).train()
    recompute_layers(model, ride_again=False)
    compile_layers(model, "aot_eager")
    tokens = torch.arange(24).reshape(2, 12) % 64
    for _ in range(2):
        with RouterLogits(model).collect():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=False).loss
        loss.backward()
        assert all(traced_logits(layer).logits is None for layer in decoder_layers(model))


def test_layers_without_experts_are_compiled_too() -> None:
    model = make("qwen2_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], moe_intermediate_size=16)
    assert len(carpool.hf.rides(model)) == 2
    assert decoder_layers(model) == list(model.model.layers)


def test_what_cannot_be_compiled() -> None:
    model = make("olmoe", num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"no backend 'inductr' here; those for users are .*inductor"):
        compile_layers(model, "inductr")
    with pytest.raises(ValueError, match="in no list of layers"):
        compile_layers(model.model.layers[0])


def compiled_in_the_first_step(layers: int) -> tuple[int, int]:
    """Graphs, and frames of Python, that the first step of a sharded model compiles."""
    sizes = {**SIZES, "num_hidden_layers": layers, "num_experts": 4, "num_experts_per_tok": 2}
    mesh = distributed_config(Degrees(fsdp=2, ep=2), bf16=False)
    model = build_model(make_config("olmoe", sizes), distributed_config=mesh, dtype=torch.float32, seed=0)
    carpool.hf.install(model)
    torch._dynamo.reset()
    compile_layers(model, "eager")  # what is compiled does not depend on the backend
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"], counters["frames"]["ok"]
    tokens = torch.arange(24).reshape(2, 12) % 64
    with RouterLogits(model).collect() as router_logits:
        out = model(input_ids=tokens, use_cache=False)
    (out.logits.sum() + balance_loss(router_logits, 2)).backward()
    return counters["stats"]["unique_graphs"] - before[0], counters["frames"]["ok"] - before[1]


def recomputed_under_fsdp(dense: str | None) -> tuple[bool, int, float, float]:
    """Whether FSDP shards experts by themselves, how many graphs layers have, and the norm of all gradients, kept and
    computed again."""
    sizes = {**SIZES, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    mesh = distributed_config(Degrees(fsdp=2, ep=2), bf16=False)
    config = make_config("olmoe", sizes)
    model = build_model(config, distributed_config=mesh, dtype=torch.float32, seed=0, dense=dense)
    carpool.hf.install(model)
    keep_experts(model)
    with sharded_parameters(model):
        parameters = list(model.parameters())
    tokens, norms = torch.arange(24).reshape(2, 12) % 64, []
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for again in (False, True):
        if again:
            recompute_layers(model, False)
            compile_layers(model, "eager")
        for _ in range(2):
            model.zero_grad()
            if (kept := replicated(model)) is not None:
                kept.begin()
            model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            if kept is not None:
                kept.finish()
        norms.append(float(grad_norm(parameters)))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return shards_inside(model.model.layers[0]), graphs, norms[0], norms[1]


def test_layers_with_experts_that_fsdp_shards_are_computed_again_eagerly(two_ranks: Ranks) -> None:
    for inside, graphs, kept, again in two_ranks(recomputed_under_fsdp, None):
        assert inside and graphs == 0 and again == pytest.approx(kept, rel=1e-6)


def test_layers_whose_experts_fsdp_does_not_have_are_compiled(two_ranks: Ranks) -> None:
    for inside, graphs, kept, again in two_ranks(recomputed_under_fsdp, "fsdp"):
        assert not inside and graphs == 1 and again == pytest.approx(kept, rel=1e-6)


@pytest.mark.slow
def test_layers_share_what_is_compiled(two_ranks: Ranks) -> None:
    """The compiler gives up at eight graphs of one function, so ten layers would show it."""
    few, many = (two_ranks(compiled_in_the_first_step, layers) for layers in (1, 10))
    assert few == many and all(few[0])
