"""Which experts of transformers are described to the kernels: those whose own gate gives the same, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, OlmoeConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from carpool.experts import Activation
from carpool.hf.seam.experts_module import expert_function

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
