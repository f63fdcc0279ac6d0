"""A family of models in one file outside the package: OLMoE with another router's name, another key, scaled logits."""

from __future__ import annotations

from functools import wraps
from typing import Any, ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from carpool.families import Family, Logits, register


class LoudConfig(OlmoeConfig):
    model_type = "loud"
    attribute_map: ClassVar[dict[str, str]] = {**OlmoeConfig.attribute_map, "experts_each": "num_experts_per_tok"}
    loudness: float = 2.0


class Switchboard(OlmoeTopKRouter):
    """A router whose name does not say so."""


class LoudForCausalLM(OlmoeForCausalLM):
    config_class = LoudConfig

    def __init__(self, config: LoudConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate.__class__ = Switchboard

    @wraps(OlmoeForCausalLM.forward)  # whose arguments it has
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.loudness
        return out


AutoConfig.register("loud", LoudConfig, exist_ok=True)
AutoModelForCausalLM.register(LoudConfig, LoudForCausalLM, exist_ok=True)
register(
    Family(
        "loud",
        module=__name__,
        router=("Switchboard",),
        top_k_keys=("experts_each",),
        logits=Logits("multiply", "loudness"),
        qk_norm="all",
    )
)
