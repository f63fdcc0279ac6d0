"""Sizes from a config.json alone, against those of transformers' models."""

from __future__ import annotations

import pytest
import torch

from carpool.hf.activation_sizes import measure_activations
from carpool.hf.seam.find_modules import experts_modules
from carpool.planner.model.shape import ModelShape
from carpool.train.blueprint import flops_per_token, meta_model, model_config, model_size, top_k_of
from carpool.train.config.published import published_models, read_keys


@pytest.mark.parametrize("name", published_models())
def test_parameters_and_operations_are_the_models_own(name: str) -> None:
    keys = {"from": name, "num_hidden_layers": 5}
    shape, model = ModelShape.read(read_keys(keys)), meta_model(model_config(keys))
    size = model_size(model, experts_modules(model), top_k_of(model))
    assert (shape.total, shape.active, shape.multiplied) == (size.total, size.active, size.multiplied)
    assert shape.flops_per_token(1000) == pytest.approx(flops_per_token(size, 1000), rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v3", "glm-4.5-air", "mixtral-8x7b"])
def test_what_layers_keep_is_what_autograd_keeps(name: str) -> None:
    keys = {"from": name, "num_hidden_layers": 4}
    shape, model = ModelShape.read(read_keys(keys)), meta_model(model_config(keys))
    measured = measure_activations(model, 1, 1024, torch.bfloat16)
    for layer, kept in list(zip(shape.layers, measured.layers, strict=True))[1:]:
        assert layer.saved_bytes(shape.hidden, 1024) == pytest.approx(kept / 1024, rel=0.03)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="says no num_experts or n_routed_experts"):
        ModelShape.read({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 3})
