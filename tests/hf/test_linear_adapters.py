"""LoRA of linear layers in 16 bits, against float64 and against peft's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from carpool.hf.linear_adapters import multiply_in_16_bits


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.proj = nn.Linear(48, 40, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


def adapted(ours: bool, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = inject_adapter_in_model(LoraConfig(r=8, lora_alpha=12, target_modules=["proj"], **settings), Model(dtype))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.2)
    if ours:
        multiply_in_16_bits(model, "default")
    return model


def results(model: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "lora" in name}
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 50, width, generator=generator).bfloat16() for width in (48, 40))
    return x, dy


def test_outputs_and_gradients_are_those_of_float64(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, theirs = adapted(True), adapted(False)
    got = results(ours, *inputs)
    exact = results(adapted(False).double(), *(one.double() for one in inputs))
    plain = results(theirs, *inputs)
    assert set(got) == set(exact) == set(plain) and len(got) == 4
    for name, want in exact.items():
        assert got[name].dtype == plain[name].dtype
        error, allowed = ((one[name].double() - want).norm() / want.norm() for one in (got, plain))
        # Of factors, gradients are float32 sums of products of values that were rounded once.
        assert error < (4e-3 if "lora" in name else max(6e-3, 1.5 * allowed)), name


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}, {"dtype": torch.float32}], ids=str
)
def test_all_else_is_pefts(settings: dict[str, Any], inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = []
    for ours in (True, False):
        model = adapted(ours, **settings)
        torch.manual_seed(2)
        found.append(results(model, *(one.to(settings.get("dtype", torch.bfloat16)) for one in inputs)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_disabled_and_merged_adapters_add_nothing(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, x = adapted(True), inputs[0]
    merged, base = model.proj(x), nn.functional.linear(x, model.proj.base_layer.weight, model.proj.base_layer.bias)
    model.proj.enable_adapters(False)
    assert torch.equal(model.proj(x), base) and not torch.equal(merged, base)
    model.proj.enable_adapters(True)
    model.proj.merge()
    torch.testing.assert_close(model.proj(x), merged, atol=0.06, rtol=0.06)
