"""Adapters on experts that are kept in 4 and 8 bits: what is loaded, and curves of plain transformers and peft.

`_curves` runs on each of the two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers.distributed import DistributedConfig

import carpool.hf
from carpool.experts.quantised import Kind, dequantise, quantise
from carpool.hf import rides
from carpool.hf.adapters import adapter_tensors, share_adapters
from carpool.hf.build_model import build_model
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.loss_head import HeadLoss, next_tokens
from carpool.hf.quantised_base import (
    QuantisedEmbedding,
    QuantisedLinear,
    base_bytes,
    layer_kind,
    quantisable_layers,
    quantise_experts,
)
from carpool.hf.seam.experts_module import base_of, weight_names
from carpool.hf.sharding import replicate_dense
from carpool.parallel.replicated import sharded_parameters
from carpool.train.blueprint import meta_model
from tests.hf.meshes import reuse_meshes
from tests.hf.parity import BOUND, relative_error
from tests.hf.test_behaviours import _alone, _own, _save
from tests.hf.test_expert_adapters import adapter, config, mean, steps
from tests.hf.tiny_models import discover, tiny_batch, tiny_model
from tests.ranks import Ranks

# gpt-oss stores matrices the other way round, and has biases.
SIZES: dict[str, dict[str, int]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "deepseek_v3": {},
}


@torch.no_grad()
def dequantised_model(model: Any, kind: Kind, keep: Sequence[str] | None = ()) -> Any:
    """A plain model with the values that it has in 4 or 8 bits."""
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            for name in weight_names(module)[:2]:
                weight = module.get_parameter(name).data
                weight = weight.transpose(1, 2) if kind == "mxfp4" and module.is_transposed else weight
                weight.copy_(dequantise(*quantise(weight, kind), weight.dtype))
    for weight in {layer.weight for layer in quantisable_layers(model, kind, keep).values()}:
        weight.copy_(dequantise(*quantise(weight[None], layer_kind(kind)), weight.dtype)[0])
    return model


def _curves(path: str, folder: str, kind: Kind) -> dict[str, float]:
    _save(folder, path, **SIZES[folder])
    reuse_meshes()
    mesh = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="carpool")
    settings: Any = {"dtype": torch.float32, "seed": 0, "dense": "zero1", "base_dtype": kind}
    model: Any = build_model(path, distributed_config=mesh, **settings)
    single: Any = dequantised_model(_alone(folder, path), kind, None)
    for one in (model, single):
        torch.manual_seed(0)
        one.add_adapter(config())
    share_adapters(model)
    kept = replicate_dense(model, False)
    start = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    with sharded_parameters(model):
        trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, foreach=False)
    losses = []
    for _ in range(3):
        kept.begin()
        loss = model(**_own(model)).loss
        (loss / dist.get_world_size()).backward()
        kept.finish()
        optimizer.step()
        optimizer.zero_grad()
        kept.write()
        losses.append(loss.detach())
    theirs = torch.stack(steps(single, tiny_batch(single), 3))
    found, reference = adapter_tensors(model), adapter(single)
    assert found.keys() == reference.keys()
    changes = max(relative_error(found[n] - start[n], t - start[n], 1e-3) for n, t in reference.items())
    return {"losses": relative_error(mean(losses), theirs), "adapter": changes / 100}


@pytest.mark.parametrize(
    ("folder", "kind"), [("gpt_oss", "nf4"), pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow)]
)
def test_adapters_train_as_peft_on_the_dequantised_model(
    two_ranks: Ranks, tmp_path: Path, folder: str, kind: Kind
) -> None:
    for errors in two_ranks(_curves, str(tmp_path), folder, kind):
        assert max(errors.values()) <= BOUND, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_model(discover()["qwen3_moe"], **SIZES["qwen3_moe"]).save_pretrained(path)
    return path


def load(folder: Path, kind: Kind | None = "nf4") -> Any:
    device = torch.device("cpu")
    model = build_model(folder, distributed_config=None, dtype=torch.bfloat16, seed=0, device=device, base_dtype=kind)
    carpool.hf.install(model)
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_is_quantised_while_it_is_loaded(folder: Path, kind: Kind) -> None:
    """Bit by bit as afterwards, and of what was loaded nothing stays."""
    model, plain = load(folder, kind), load(folder, None)
    for (name, own), whole in zip(rides(model).items(), rides(plain).values(), strict=True):
        for weight in weight_names(own.experts)[:2]:
            want = quantise(whole.experts.get_parameter(weight), kind)
            assert all(torch.equal(a, b) for a, b in zip(base_of(own.experts)[weight], want, strict=True))
            parameter = own.experts.get_parameter(weight)
            assert parameter.untyped_storage().nbytes() == 2 and not parameter.requires_grad
            assert f"{name}.{weight}" not in model.state_dict()
    batch = tiny_batch(model)
    after = dequantised_model(plain, kind)
    assert torch.equal(model(**batch).logits, after(**batch).logits)
    assert quantise_experts(load(folder, None), kind) == sum(
        one.nbytes for own in rides(model).values() for one in base_of(own.experts).values()
    )
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear | QuantisedEmbedding)]
    meta = meta_model(folder)
    number, size = base_bytes(meta, kind, ())
    assert number == sum(layer.weight.numel() for layer in layers) and len(layers) == 2 + 4 * len(rides(model))
    assert size == sum(base_of(layer)["weight"].nbytes for layer in layers)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4")])
def test_random_weights_are_quantised_as_they_are_drawn(family: str, kind: Kind) -> None:
    sizes = SIZES[family] | {"tie_word_embeddings": True}
    made = tiny_model(discover()[family], **sizes).config
    settings: Any = {"distributed_config": None, "dtype": torch.float32, "seed": 0}
    model = build_model(made, base_dtype=kind, base_keep=["q_proj"], **settings)
    want = dequantised_model(build_model(made, **settings), kind, ["q_proj"])
    assert not any(base_of(module) for name, module in model.named_modules() if name.endswith("q_proj"))
    carpool.hf.install(model)
    batch = tiny_batch(model)
    torch.testing.assert_close(model(**batch).logits, want(**batch).logits, rtol=1e-4, atol=1e-4)


def test_what_such_a_model_cannot_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot compute a quantised base: use 'grouped'"):
        carpool.hf.set_experts(model := load(folder), "fp8")
        model(**tiny_batch(model))
    adapted: Any = get_peft_model(model := load(folder), config())
    with pytest.raises(ValueError, match="merge them into the model that these were loaded from"):
        adapted.merge_and_unload()
    with pytest.raises(ValueError, match="stay on their device"):
        keep_experts_in_host_memory(model)
    narrow = tmp_path / "narrow"
    tiny_model(discover()["qwen3_moe"]).save_pretrained(narrow)
    with pytest.raises(ValueError, match=r"cannot be kept in nf4: .* do not divide .*int8"):
        load(narrow)


@pytest.mark.parametrize("way", ["checkpointed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_layers_that_are_computed_again_or_compiled(folder: Path, way: str) -> None:
    found = []
    for one in ("plain", way):
        torch.manual_seed(0)
        model = load(folder)
        adapted: Any = get_peft_model(model, config())
        if one == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if one == "compiled":
            carpool.hf.compile_layers(model, "eager")
        found.append(torch.stack(steps(adapted, tiny_batch(model), 2)))
    assert torch.equal(*found)


@pytest.mark.parametrize("at_once", [None, 7])
def test_an_output_layer_in_parts(at_once: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients and logits are those of the whole matrix, of which a part at a time is there."""

    def run(elements: int) -> tuple[list[torch.Tensor], int]:
        made = []

        def counted(*given: Any, **settings: Any) -> torch.Tensor:
            made.append(found := dequantise(*given, **settings))
            return found

        monkeypatch.setattr("carpool.experts.quantised.dequantise", counted)
        monkeypatch.setattr("carpool.experts.quantised.AT_ONCE", elements)
        torch.manual_seed(0)
        build: Any = {"distributed_config": None, "dtype": torch.float32, "seed": 0, "base_dtype": "nf4"}
        carpool.hf.install(model := build_model(tmp_path, **build))
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        with torch.no_grad():
            logits = model(inputs_embeds=embedded).logits
        loss, _ = HeadLoss(model, at_once)(None, next_tokens(ids), inputs_embeds=embedded, use_cache=False)
        loss.backward()
        return [loss.detach(), embedded.grad, logits], max(one.numel() for one in made)

    words, hidden = 300, 64
    tiny_model(discover()["qwen3_moe"], **SIZES["qwen3_moe"], vocab_size=words).save_pretrained(tmp_path)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    whole, most = run(2**27)
    parts, most_of_parts = run(128 * hidden)
    assert most == words * hidden and most_of_parts <= 128 * hidden
    for got, want in zip(parts, whole, strict=True):
        assert relative_error(got, want) < 1e-6
