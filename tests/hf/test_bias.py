"""Biases that move against the load: every model of transformers that has them, and a run of `carpool train`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import carpool.hf
from carpool.families import Family
from carpool.hf import BiasBalance
from carpool.hf.decoder_layers import compile_layers, eagerly
from carpool.hf.routing.router_balance import RouterLogits, balance_loss, find_biases, find_routers
from tests.hf.parity import EXCEPTIONS
from tests.hf.test_compiled import make
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks
from tests.train.test_loop import records, run, weights

NAMES = Family("").selection_bias
MODELS = Path(transformers.__file__).parent / "models"
# Lfm2-MoE has one only if its configuration asks for it; DeepSeek-V4's first layers route by hashes.
WITH_BIAS = sorted(
    folder
    for folder in discover().keys() - EXCEPTIONS.keys()
    if any(f"self.{name} = " in path.read_text() for path in (MODELS / folder).glob("modeling_*.py") for name in NAMES)
)


def test_these_models_have_a_bias() -> None:
    assert {"deepseek_v3", "glm4_moe", "ernie4_5_moe", "afmoe", "laguna", "lfm2_moe", "minimax_m2"} <= set(WITH_BIAS)
    assert len(WITH_BIAS) >= 25


@pytest.mark.parametrize("folder", WITH_BIAS)
def test_the_bias_of_every_model_moves_against_its_load(folder: str) -> None:
    model: Any = tiny_model(discover()[folder]).train()
    carpool.hf.install(model)
    found = find_biases(model)
    balance = BiasBalance(model, 0.25)
    seen: dict[str, torch.Tensor] = {}
    for name in found:
        hook = lambda _, args, kwargs, name=name: seen.__setitem__(name, (*args, *kwargs.values())[1])  # noqa: E731
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    before = {name: getattr(*place).detach().clone().flatten() for name, place in found.items()}
    with torch.no_grad():
        model(**tiny_batch(model))
        model.eval()(**tiny_batch(model))  # is not in the load
    assert seen
    for name in found.keys() - seen.keys():  # experts for images, of which there are none: no load, no move
        seen[name] = torch.empty(0, 2, dtype=torch.long)
    idle = {name for name, index_TK in seen.items() if not len(index_TK)}
    chosen = {name: seen[name].clone() for name in found}
    balance.step()
    for name, place in found.items():
        load_E = torch.bincount(chosen[name].flatten(), minlength=len(before[name]))[: len(before[name])].double()
        want = before[name] + 0.25 * torch.sign(load_E.mean() - load_E)
        assert torch.allclose(getattr(*place).flatten().double(), want.double(), atol=1e-6), name
        assert (getattr(*place).flatten() != before[name]).any() == (name not in idle)
    with torch.no_grad():  # what it moved is what the router chooses by: a far larger bias draws every token
        for place in found.values():
            getattr(*place).view(-1)[3] += 1000.0
        model(**tiny_batch(model))
    assert all((seen[name] == 3).any(1).all() for name in found if name not in idle)


def test_models_without_a_bias_are_refused() -> None:
    model: Any = tiny_model(discover()["olmoe"])
    carpool.hf.install(model)
    with pytest.raises(ValueError, match="OlmoeForCausalLM has no bias per expert"):
        BiasBalance(model, 0.001)
    with pytest.raises(ValueError, match="rate 0 must be positive"):
        BiasBalance(model, 0.0)


def test_a_bias_in_bfloat16_is_kept_in_float32() -> None:
    """Steps of 0.001 would be lost beside a bias of 1."""
    model: Any = tiny_model(discover()["deepseek_v3"]).bfloat16().train()
    carpool.hf.install(model)
    holder, name = next(iter(find_biases(model).values()))
    holder._buffers[name] = torch.ones(8, dtype=torch.bfloat16)
    balance = BiasBalance(model, 0.001)
    with torch.no_grad():
        model(**tiny_batch(model))
    balance.step()
    assert holder._buffers[name].dtype == torch.float32
    assert 0 < (holder._buffers[name] - 1).abs().max() <= 0.0011


MODEL = [
    "model.model_type=deepseek_v3", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.moe_intermediate_size=16", "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4", "model.config.n_routed_experts=8", "model.config.num_experts_per_tok=2",
    "model.config.n_group=1", "model.config.topk_group=1", "model.config.first_k_dense_replace=0",
    "model.config.q_lora_rank=16", "model.config.kv_lora_rank=16", "model.config.qk_nope_head_dim=8",
    "model.config.qk_rope_head_dim=8", "model.config.v_head_dim=8", "data.sequence_length=32", "training.max_steps=6",
    "training.save_steps=3", "training.eval_steps=100", "training.sample_prompt=none", "training.save_pretrained=false",
]  # fmt: skip
TWO = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
ONE = ["training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2"]


def _alone(output: Path, overrides: list[str]) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return run(str(output), overrides)
    finally:
        dist.destroy_process_group()


def _biases(output: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights(output, step).items() if name.endswith(NAMES)}


def test_a_run_moves_its_biases_as_one_process_does(two_ranks: Ranks, text: list[str], tmp_path: Path) -> None:
    """On two ranks, in several micro-batches, with layers computed again; and resumed."""
    two, one, still, again = (tmp_path / name for name in ("two", "one", "still", "again"))
    rate = [*text, *MODEL, "moe.bias_update_rate=0.01"]
    assert two_ranks(run, str(two), [*rate, *TWO, "memory.layer_activations=recompute"]) == [""] * 2
    assert _alone(one, [*rate, *ONE]) == ""
    assert two_ranks(run, str(still), [*text, *MODEL, *TWO, "moe.bias_update_rate=0"]) == [""] * 2
    for step in (3, 6):
        ours, theirs = _biases(two, step), _biases(one, step)
        assert len(ours) == 2 and ours.keys() == theirs.keys()
        for name, bias in ours.items():
            assert torch.equal(bias, theirs[name]) and bias.any(), name
    assert all(not bias.any() for bias in _biases(still, 6).values())
    uneven, even = (records(output)[6]["load_max_over_mean"] for output in (still, two))
    assert even < 0.9 * uneven, (even, uneven)
    resumed = [*rate, *TWO, f"training.resume_from_checkpoint={two}/checkpoints/step-00000003"]
    assert two_ranks(run, str(again), [*resumed, "memory.layer_activations=recompute"]) == [""] * 2
    assert all(torch.equal(bias, _biases(again, 6)[name]) for name, bias in _biases(two, 6).items())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "olmoe"])
def test_a_run_from_scratch_takes_deepseeks_rate_where_there_is_a_bias(
    text: list[str], tmp_path: Path, model_type: str
) -> None:
    few = ["model.config.num_hidden_layers=1", "training.max_steps=1", "training.save_steps=100"]
    of_olmoe = ["model.model_type=olmoe", *MODEL[1:3], *MODEL[5:7], *MODEL[-6:]]
    model = [*(MODEL if model_type == "deepseek_v3" else of_olmoe), *few]
    assert _alone(tmp_path / "run", [*text, *model, *ONE]) == ""
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["bias_update_rate"] == (0.001 if model_type == "deepseek_v3" else 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Router logits that are collected: those that models return, with their gradients, compiled and checkpointed too.


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
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)
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
