"""Which experts of transformers are described to the kernels: those whose own gate gives the same, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, OlmoeConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from carpool import ActivationPolicies
from carpool.experts import Activation, Choices
from carpool.hf import install, rides, set_activation_policies, set_experts
from carpool.hf.seam.experts_module import expert_function
from tests.hf.parity import quiet
from tests.hf.tiny_models import discover, tiny_batch, tiny_model

SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 6}
KNOWN = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


@use_experts_implementation(has_gate=False)
class Gateless(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 2, ACT2FN[config.hidden_act]
        self.up_proj = torch.nn.Parameter(torch.zeros(2, 6, 8))
        self.down_proj = torch.nn.Parameter(torch.zeros(2, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def check(experts: Any, own: Any, width: int) -> Activation:
    """The description gives what the module's own function does, bit for bit, also where it clamps."""
    function = expert_function(experts)
    assert function is not None and isinstance(function.activation, Activation)
    for dtype in (torch.float32, torch.bfloat16):
        h = (8 * torch.randn(50, width)).to(dtype)
        assert torch.equal(function.activation(h), own(h))
    return function.activation


@pytest.mark.parametrize("act", list(KNOWN))
def test_the_decorators_default_gate(act: str) -> None:
    config = OlmoeConfig(**SMALL, hidden_act=act)
    experts = OlmoeExperts(config)
    assert check(experts, experts._apply_gate, 12) == Activation(KNOWN[act], gated=True)
    gateless = Gateless(config)
    assert check(gateless, gateless.act_fn, 6) == Activation(KNOWN[act])


def test_gpt_oss() -> None:
    experts = GptOssExperts(GptOssConfig(**SMALL, num_local_experts=2))
    assert experts.limit == 7.0, "what is drawn must be clamped"
    found = check(experts, experts._apply_gate, 12)
    assert found == Activation("silu", True, interleaved=True, limit=7.0, alpha=experts.alpha, up_shift=1.0)


def test_what_is_not_known_is_called_as_it_is() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=2, hidden_act="quick_gelu")
    unknown = MixtralExperts(config)
    assert not isinstance(expert_function(unknown).activation, Activation)  # type: ignore[union-attr]

    class Other(MixtralExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up[..., :6]

    config.hidden_act = "silu"
    other, replaced = Other(config), MixtralExperts(config)
    replaced._apply_gate = other._apply_gate
    h = torch.randn(3, 12)
    for experts in (other, replaced):
        function = expert_function(experts)
        assert function is not None and not isinstance(function.activation, Activation)
        assert torch.equal(function.activation(h), h[:, :6])


# --------------------------------------------------------------------------------------------------------------------
# `carpool.hf.set_experts`: what experts keep and how their stages are computed, in a model of transformers.


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward, each storage once."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("folder", ["olmoe", "gpt_oss"])
def test_recompute_gives_the_same_bits_from_less_memory(folder: str) -> None:
    quiet()
    model: Any = tiny_model(discover()[folder]).train()
    install(model)
    batch = tiny_batch(model)
    kept, size = gradients(model, batch), saved_bytes(model, batch)
    set_activation_policies(model, ActivationPolicies(expert_activations="recompute"))
    assert all(own.compute.recompute for own in rides(model).values())  # type: ignore[union-attr]
    again = gradients(model, batch)
    assert list(again) == list(kept) and any("experts" in name for name in kept)
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name
    # Per layer the pre-activation of each pair of a token and an expert, in float32.
    own = next(iter(rides(model).values()))
    assert own.routing is not None
    pairs, width = own.routing.expert_TK.numel(), own.experts.gate_up_proj.shape[1 if folder == "olmoe" else 2]
    assert size - saved_bytes(model, batch) == 4 * pairs * width * len(rides(model))


def test_choices_reach_every_layer() -> None:
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    choices = Choices(up="flat", ddown="square")
    set_experts(model, "grouped", choices=choices)
    assert [own.compute.choices for own in rides(model).values()] == [choices] * len(rides(model))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="experts='fp8' has no option 'choices'"):
        set_experts(model, "fp8", choices=choices)
    set_experts(model, "reference")
    with pytest.raises(ValueError, match="experts='reference' has no option 'recompute'"):
        set_activation_policies(model, ActivationPolicies(expert_activations="recompute"))
    assert all(own.policies == ActivationPolicies() for own in rides(model).values())


def test_own_forwards_have_no_stages_and_cannot_recompute() -> None:
    model: Any = tiny_model(discover()["olmoe"]).train()
    install(model)
    own = next(iter(rides(model).values()))
    own.function = own.compute = None  # as of experts that only their own forward knows
    own.set_experts("auto", Choices.all("flat"))
    assert own.compute is None
    with pytest.raises(ValueError, match="runs its own forward, whose activations autograd saves"):
        own.set_activation_policies(ActivationPolicies(expert_activations="recompute"))
