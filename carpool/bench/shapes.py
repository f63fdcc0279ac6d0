"""Sizes of what is measured: of rides, and of MoE layers, by number or those that a published model has; and how many
operations a layer takes.

A family is what an expert computes, named after the class of transformers that computes it. Models have their own;
shapes that are given by number have `FAMILY_OF[activation]`.

Operations are those that the mathematics needs, two for each multiplication: a token visits K experts, each of which
multiplies it by an up projection (H x F, for gated experts H x 2F) and a down projection (F x H):

    gated    2 T K (2 H F + F H) = 6 T K H F        not gated    2 T K (H F + F H) = 4 T K H F

The backward takes twice as many, a product for the gradient of each factor. What is computed a second time, to keep
less, is not counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.bench.options import check_experts, one_of, parse_sizes
from carpool.families import family

FAMILY_OF = {"swiglu": "qwen3_moe", "gpt-oss": "gpt_oss", "relu2": "nemotron_h"}


@dataclass(frozen=True)
class RideShape:
    """Tokens per rank, hidden size, experts of all ranks, experts per token."""

    tokens: int
    hidden: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> RideShape:
        """From "4096,7168,256,8"; ValueError if that is no shape."""
        names = ("tokens", "hidden", "experts", "top-k")
        shape = cls(*parse_sizes(text, names, "4096,7168,256,8"))
        check_experts(f"--shape {text}", shape.top_k, shape.experts)
        return shape

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, E {self.experts}, K {self.top_k}"


@dataclass(frozen=True)
class LayerShape:
    """Tokens (of each rank), hidden size, the experts' hidden size, experts (of all ranks), experts per token.

    Attributes:
        family: what the experts compute.
        model: the model whose sizes these are; "" if none.
    """

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    family: str = "qwen3_moe"
    model: str = ""

    @classmethod
    def parse(cls, text: str, activation: str = "swiglu") -> LayerShape:
        """From "8192,2048,1024,64,8"; ValueError if that is no shape."""
        one_of("--activation", activation, tuple(FAMILY_OF))
        names = ("tokens", "hidden", "expert hidden", "experts", "top-k")
        tokens, hidden, inner, experts, top_k = parse_sizes(text, names, "8192,2048,1024,64,8")
        shape = cls(tokens, hidden, inner, experts, top_k, FAMILY_OF[activation])
        check_experts(f"--shape {text}", shape.top_k, shape.experts)
        return shape

    @classmethod
    def of_model(cls, name: str, tokens: int) -> LayerShape:
        """The sizes of a model's MoE layers."""
        one_of("--model", name, tuple(MODELS))
        if tokens < 1:
            raise ValueError(f"--tokens {tokens} must be at least 1")
        family, hidden, inner, experts, top_k = MODELS[name]
        return cls(tokens, hidden, inner, experts, top_k, family, name)

    @property
    def gated(self) -> bool:
        return family(self.family).gated

    @property
    def flops(self) -> int:
        """Operations of the forward of one rank's tokens."""
        return (6 if self.gated else 4) * self.tokens * self.top_k * self.hidden * self.inner

    def __str__(self) -> str:
        sizes = f"T {self.tokens}, H {self.hidden}, F {self.inner}, E {self.experts}, K {self.top_k}"
        activation = next((name for name, family in FAMILY_OF.items() if family == self.family), "")
        what = self.model or ("" if activation == "swiglu" else activation)
        return f"{what}: {sizes}" if what else sizes


# Family, H, F, E, K, from the configuration that was published with the weights.
MODELS: dict[str, tuple[str, int, int, int, int]] = {
    "olmoe": ("olmoe", 2048, 1024, 64, 8),  # allenai/OLMoE-1B-7B-0924
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 768, 128, 8),  # Qwen/Qwen3-30B-A3B
    "mixtral-8x7b": ("mixtral", 4096, 14336, 8, 2),  # mistralai/Mixtral-8x7B-v0.1
    "deepseek-v3": ("deepseek_v3", 7168, 2048, 256, 8),  # deepseek-ai/DeepSeek-V3, routed experts only
    "gpt-oss-120b": ("gpt_oss", 2880, 2880, 128, 4),  # openai/gpt-oss-120b
}


RIDE_SHAPES_GPU = (RideShape(4096, 7168, 256, 8), RideShape(8192, 2048, 64, 8), RideShape(8192, 4096, 128, 8))
# For a laptop. 32 experts, so that every routing is possible on four ranks.
RIDE_SHAPES_CPU = (RideShape(1024, 256, 32, 4),)
LAYER_SHAPES_GPU = (
    LayerShape(8192, 2048, 1024, 64, 8),
    LayerShape(8192, 2048, 768, 128, 8),
    LayerShape(32768, 4096, 1024, 128, 8),
    LayerShape(24576, 1536, 256, 128, 8),
)
LAYER_SHAPES_CPU = (LayerShape(128, 64, 48, 16, 4),)  # seconds on a laptop


def list_shapes(
    shapes: Sequence[str], models: Sequence[str], tokens: int, activation: str | None
) -> tuple[LayerShape, ...]:
    """The shapes that the options --shape, --model, --tokens and --activation name.

    Raises:
        ValueError: an unknown name, or sizes that are none.
    """
    if activation is not None and not shapes:
        raise ValueError("--activation is what the experts of --shape compute; models have their own. Give a --shape")
    given = tuple(LayerShape.parse(text, activation or "swiglu") for text in shapes)
    return given + tuple(LayerShape.of_model(name, tokens) for name in models)
