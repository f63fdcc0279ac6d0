"""`compile_layers`: the same losses and gradients, layers that are found, errors that say what is wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import carpool.hf
from carpool import ActivationPolicies
from carpool.activations.host_memory import HostPool
from carpool.activations.offload import Offloaded, Offloader
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.hf import install, offload_layers, rides, set_activation_policies
from carpool.hf.build_model import build_model
from carpool.hf.decoder_layers import (
    compile_layers,
    draws_random_numbers,
    eagerly,
    offloaders,
    recompute_layers,
    shards_inside,
)
from carpool.hf.routing.router_balance import RouterLogits, balance_loss, traced_logits
from carpool.hf.seam.find_modules import decoder_layers
from carpool.hf.sharding import keep_experts
from carpool.hf.weights.model_config import make_config
from carpool.metrics.counters import in_recompute
from carpool.parallel.degrees import Degrees
from carpool.parallel.replicated import replicated, sharded_parameters
from carpool.planner.candidate import COMPILED_AGAIN
from carpool.routing.routing import DropOptions
from carpool.train.plan.division import distributed_config
from tests.hf.parity import quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
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


def olmoe(**more: object) -> Any:
    return make("olmoe", num_experts=4, num_experts_per_tok=2, **more).train()


def answer(model: nn.Module, router_logits: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    tokens = torch.arange(24).reshape(2, 12) % 64
    loss = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=router_logits).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_compiled_layers_give_the_same_loss_and_gradients() -> None:
    model = olmoe()
    loss, gradients = answer(model)
    assert compile_layers(model, "aot_eager") == 3
    compiled, ours = answer(model)
    torch.testing.assert_close(compiled, loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-7)
    with eagerly():
        again, theirs = answer(model)
    assert torch.equal(again, loss) and all(torch.equal(theirs[name], g) for name, g in gradients.items())


@pytest.mark.parametrize("ride_again", [False, True])
def test_layers_that_are_computed_again_are_compiled_too(ride_again: bool) -> None:
    model = olmoe()
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
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-7)


def test_no_step_outlives_a_layer_that_is_computed_again() -> None:
    """Its checkpoint leaves the layer before its end, with what routers made."""
    model = olmoe()
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
    model = olmoe()
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
    for own in carpool.hf.rides(model).values():  # a forward that makes its transports is not compiled
        own.prepare(2, sizes["hidden_size"])
    compile_layers(model, "eager")  # what is compiled does not depend on the backend
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"], counters["frames"]["ok"]
    tokens = torch.arange(24).reshape(2, 12) % 64
    with RouterLogits(model).collect() as router_logits:
        out = model(input_ids=tokens, use_cache=False)
    (out.logits.sum() + balance_loss(router_logits, 2)).backward()
    return counters["stats"]["unique_graphs"] - before[0], counters["frames"]["ok"] - before[1]


def recomputed_under_fsdp(dense: str | None, backend: str, ride_again: bool, able: bool) -> tuple[bool, int, float]:
    """Whether FSDP shards experts by themselves, how many graphs layers have, and the largest difference of gradients
    from those of eager layers that save all. `able`: PyTorch compiles what is computed again."""
    with mock.patch.object(carpool.hf.decoder_layers, "COMPILED_AGAIN", able):
        return _recomputed_under_fsdp(dense, backend, ride_again)


def _recomputed_under_fsdp(dense: str | None, backend: str, ride_again: bool) -> tuple[bool, int, float]:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    mesh = distributed_config(Degrees(fsdp=dist.get_world_size(), ep=2), bf16=False)
    config = make_config("olmoe", sizes)
    model = build_model(config, distributed_config=mesh, dtype=torch.float32, seed=0, dense=dense)
    carpool.hf.install(model)
    keep_experts(model)
    with sharded_parameters(model):
        parameters = list(model.parameters())
    tokens, gradients = torch.arange(24).reshape(2, 12) % 64, []
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for again in (False, True):
        if again:
            recompute_layers(model, ride_again)
            compile_layers(model, backend)
        for _ in range(2):
            model.zero_grad()
            if (kept := replicated(model)) is not None:
                kept.begin()
            model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            if kept is not None:
                kept.finish()
        gradients.append([one.grad.to_local().clone() for one in parameters if isinstance(one.grad, DTensor)])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert len(gradients[0]) == len(gradients[1]) > 10
    most = max(float((one - other).abs().max()) for one, other in zip(*gradients, strict=True) if one.numel())
    return shards_inside(model.model.layers[0]), graphs, most


@pytest.mark.parametrize(
    ("number", "dense", "backend", "ride_again", "able"),
    [
        (2, None, "eager", False, False), (2, None, "eager", False, COMPILED_AGAIN),
        pytest.param(4, None, "aot_eager", True, COMPILED_AGAIN, marks=pytest.mark.slow),
        (2, "fsdp", "eager", False, COMPILED_AGAIN),
    ],
)  # fmt: skip
def test_layers_that_fsdp_shards_are_computed_again(
    two_ranks: Ranks, ranks: Ranks, number: int, dense: str | None, backend: str, ride_again: bool, able: bool
) -> None:
    """Compiled where PyTorch can: the bits of layers that save all, by the compiler that changes nothing."""
    start = two_ranks if number == 2 else ranks
    for inside, graphs, most in start(recomputed_under_fsdp, dense, backend, ride_again, able):
        assert inside == (dense is None) and (graphs > 0) == (able or not inside)
        assert most <= (0 if backend == "eager" else 1e-6)


@pytest.mark.slow
def test_layers_share_what_is_compiled(two_ranks: Ranks) -> None:
    """The compiler gives up at eight graphs of one function, so ten layers would show it."""
    few, many = (two_ranks(compiled_in_the_first_step, layers) for layers in (1, 10))
    assert few == many and all(few[0])


def test_layers_with_adapters_share_what_is_compiled() -> None:
    """The first one has inputs without a gradient, as embeddings are frozen; all others have one graph."""
    model = make("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "mlp.gate.weight"])
    adapted = get_peft_model(model, lora)
    for own in rides(model).values():
        own.prepare(2, 32)
    torch._dynamo.reset()
    compile_layers(model, "eager")
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    for _ in range(2):
        tokens = torch.arange(24).reshape(2, 12) % 64
        adapted(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert counters["stats"]["unique_graphs"] - graphs == 2 and sum(counters["graph_break"].values()) == breaks


# --------------------------------------------------------------------------------------------------------------------
# Which models draw random numbers, so that layers that are computed again must note their state.


@pytest.mark.parametrize("what", ["nothing", "attention", "module", "jitter", "second choices"])
def test_what_is_random_is_found(what: str) -> None:
    if what == "jitter":
        model: Any = make("mixtral", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1).train()
    else:
        model = olmoe(attention_dropout=0.1 if what == "attention" else 0.0)
    if what == "module":
        model.extra = torch.nn.Dropout(0.1)
    if what == "second choices":
        next(iter(rides(model).values())).set_drops(DropOptions(random_second=True))
    assert draws_random_numbers(model) == (what != "nothing")


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


@pytest.mark.parametrize("checkpoint", ["ours", "early stop off", "reentrant"])
@pytest.mark.parametrize("kind", ["all parameters", "adapters", "shared experts", "its output is read"])
def test_down_is_not_computed_again_where_nobody_reads_it(
    kind: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Gemma normalise what experts return, and save that; shared experts save something after the ride."""
    folder = {"shared experts": "qwen2_moe", "its output is read": "gemma4"}.get(kind, "qwen3_moe")
    seen: list[bool] = []
    down = GroupedProducts.down
    monkeypatch.setattr(
        GroupedProducts, "down", lambda *given, **named: seen.append(in_recompute()) or down(*given, **named)
    )
    quiet()
    found = []
    for again in (None, checkpoint):
        model: Any = tiny_model(discover()[folder]).train()
        install(model)
        if kind == "adapters":
            torch.manual_seed(0)
            targets = ["experts.gate_up_proj", "experts.down_proj"]
            lora = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], target_parameters=targets)
            get_peft_model(model, lora)
        if again == "reentrant":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
        elif again is not None:
            recompute_layers(model, ride_again=True)
        with torch.utils.checkpoint.set_checkpoint_early_stop(again != "early stop off"):
            found.append(gradients(model, tiny_batch(model), False))
    assert found[0] and found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], one) for name, one in found[0].items())
    skipped = checkpoint == "ours" and kind in ("all parameters", "adapters")
    assert seen.count(False) == 4 * len(rides(model)) and seen.count(True) == (0 if skipped else 2 * len(rides(model)))


# --------------------------------------------------------------------------------------------------------------------
# Activations of decoder layers in host memory: the same gradients, and little that stays on the device.


def gradients(model: Any, batch: dict[str, torch.Tensor], autocast: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("folder", "autocast"), [("olmoe", True), ("deepseek_v3", False)])
def test_the_gradients_are_those_without(folder: str, autocast: bool) -> None:
    quiet()
    model: Any = tiny_model(discover()[folder]).train()
    install(model)
    batch = tiny_batch(model)
    want = gradients(model, batch, autocast)
    offload, put = offload_layers(model), []
    plain = offload.offloader.put
    offload.offloader.put = lambda items, lane=0: put.append([item.data for item in items]) or plain(items, lane)  # type: ignore[method-assign, func-returns-value]
    for policies in (ActivationPolicies(), ActivationPolicies("offload", "offload")):
        put.clear()
        set_activation_policies(model, policies)
        got = gradients(model, batch, autocast)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
        assert len(put) == 2 * len(decoder_layers(model)), "once for each layer and forward"
        assert not offload.offloader._parcels and not offload.offloader._lanes[0].here
    # Neither weights, nor their copies in another dtype, nor what rides keep by a policy of their own.
    tokens, hidden = batch["input_ids"].numel(), model.config.hidden_size
    for weight in model.parameters():
        same = [
            t.shape
            for tensors in put
            for t in tensors
            for turned in (weight.detach(), weight.detach().mT if weight.dim() > 1 else weight.detach())
            if t.numel() == turned.numel() and torch.equal(t, turned.flatten().to(t.dtype))
        ]
        assert not same or weight.dim() == 1
    assert all(sum(t.numel() >= tokens * hidden for t in tensors) >= 4 for tensors in put)
    addresses = [t.data_ptr() for t in put[0]]
    assert len(set(addresses)) == len(addresses), "each once"


def test_steps_copy_to_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph must: it knows addresses."""
    quiet()
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    offload_layers(model)
    set_activation_policies(model, ActivationPolicies("offload", "offload"))
    batch, found = tiny_batch(model), []
    of_layers, of_rides = (one for one in offloaders(model))
    assert of_layers is not of_rides
    plain = Offloader.put

    def put(offloader: Offloader, *args: Any) -> list[Offloaded]:
        away = plain(offloader, *args)
        found.append([item.data.data_ptr() for item in offloader._parcels[int(away[0].data)].host])
        return away

    monkeypatch.setattr(Offloader, "put", put)
    steps = []
    for _ in range(3):
        found.clear()
        gradients(model, batch, False)
        for offloader in (of_layers, of_rides):
            offloader.join()
            assert not any(lane.here for lane in offloader._lanes.values())
        taken = [0 if one._pool is None else one._pool.bytes for one in (of_layers, of_rides)]
        steps.append((list(found), taken))
    assert steps[0][1] == steps[1][1] == steps[2][1] and all(steps[0][1])
    assert steps[1][0] == steps[2][0]
    # Of two forwards with a backward in between, the second takes what the first has given back.
    addresses = [address for item in steps[0][0] for address in item if address]
    assert len(set(addresses)) == len(addresses) // 2


def test_a_buffer_is_not_taken_for_much_less() -> None:
    pool = HostPool(torch.device("cpu"))
    first, second = pool.take(1000), pool.take(600)
    pool.give(first)
    pool.give(second)
    assert pool.take(500) is not first and pool.take(501) is first and pool.take(900).numel() == 900
    assert pool.bytes == 2500


def test_rows_that_are_kept_stay() -> None:
    quiet()
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    offload, sizes = offload_layers(model), {}
    for policies in (ActivationPolicies(), ActivationPolicies("offload", "offload")):
        set_activation_policies(model, policies)
        loss = model(**tiny_batch(model)).loss
        parcels = offload.offloader._parcels.values()
        sizes[policies] = sorted(item.data.nbytes for parcel in parcels for item in parcel.host)
        del loss
        assert not parcels, "nothing outlives its graph"
    assert len(set(map(tuple, sizes.values()))) == 1, "what layers offload does not depend on what rides do"
    assert all(own.policies.expert_inputs == "offload" for own in rides(model).values())


def test_without_gradients_nothing_is_offloaded() -> None:
    quiet()
    model: Any = tiny_model(discover()["olmoe"])
    install(model)
    offload = offload_layers(model)
    with torch.no_grad():
        model(**tiny_batch(model))
    assert not offload.offloader._lanes
