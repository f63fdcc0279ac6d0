"""The sizes of a model with experts, from the keys of its config.json alone: parameters, operations, what is saved.

    shape = ModelShape.read(json.loads(Path("config.json").read_text()))
    shape.total, shape.active            30,532,122,624 and 3,353,032,704 for Qwen3-30B-A3B
    shape.layers[0].saved_bytes(4096)     79,740 bytes a token that autograd saves of attention, norms and the router

The counts are held against transformers' own models for every published configuration that ships with Carpool
(`tests/planner/test_cost.py`). Families differ in few places, and each place is a key or a set of names below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from carpool.families import family
from carpool.parallel.schedules import cut
from carpool.planner.model.routes import Choice

Kind = Literal["full", "window", "linear"]


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        kind: of its attention.
        heads, key_heads, qk_size, value_size: of attention; sizes of one head.
        products: (in, out) of each matrix that multiplies every token: attention, router, dense MLP, shared experts.
        attention_products: how many of them, from the first on, are attention's.
        others: parameters that are no such matrix: norms, biases.
        dense_width: F of its dense MLP; 0: it has experts.
        shared_width: F of the shared expert; 0: none.
        latent: elements of a token that latent attention normalises and saves.
        normed: elements of a token's queries and keys that have norms of their own.
        float_norms: norms multiply by 1 + weight, in float32.
        gated: elements of a token's attention output that a gate multiplies.
        convolved, decays: of linear attention, elements of a token that a convolution mixes; that have a decay each.
        float_router: the router computes in float32.
        whole_scores: score matrices are computed whole and saved; attention is not fused.
        experts: whether it has routed ones.
    """

    kind: Kind
    heads: int
    key_heads: int
    qk_size: int
    value_size: int
    products: tuple[tuple[int, int], ...]
    attention_products: int
    others: int
    dense_width: int
    shared_width: int
    latent: int = 0
    normed: int = 0
    float_norms: bool = False
    gated: int = 0
    convolved: int = 0
    decays: int = 0
    float_router: bool = False
    whole_scores: bool = False

    def __hash__(self) -> int:
        # Layers are keys in searches; all fields take long.
        return hash((self.kind, self.heads, self.qk_size, self.dense_width, self.shared_width))

    @property
    def experts(self) -> bool:
        return self.dense_width == 0

    @cached_property
    def dense_parameters(self) -> int:
        """All but routed experts."""
        return sum(a * b for a, b in self.products) + self.others

    def linear_bytes(self, element_size: int = 2) -> float:
        """Those of linear attention by kernels such as flash-linear-attention's: what goes into its convolution and
        comes out, decays in float32 from step to step, and its output, which has a norm and a gate in float32."""
        of_output = (16 + 2 * element_size) * self.heads * self.value_size if self.kind == "linear" else 0
        return 2 * element_size * self.convolved + 17 * self.decays + of_output

    def saved_bytes(self, hidden: int, length: int, element_size: int = 2, compiled: bool = False) -> float:
        """Bytes of a token that autograd saves for the backward, without those of its ride.

        Each norm saves its input in float32, the normalised input and its output (8 bytes an element in bfloat16);
        attention its queries, keys, values and output; gated MLPs four tensors of F. Of norms, compiled layers save the
        input as it came, and compute the rest again.
        """
        e = element_size
        normed = e if compiled else 8 if self.float_norms else 4 + e
        norm = normed if compiled else normed + e
        q, k, v = self.heads * self.qk_size, self.key_heads * self.qk_size, self.key_heads * self.value_size
        saved: float = 2 * norm * hidden + 4 * self.heads
        if self.kind == "linear":
            saved += self.linear_bytes(e)
        else:
            saved += e * (q + k + v + self.heads * self.value_size + 2 * self.gated)
        if (hidden, 1) in self.products:
            saved += e * hidden  # what the gate of the shared expert multiplies
        if self.latent:
            # Keys are put together from two parts; values stay a part of a larger product.
            saved += norm * self.latent + e * self.key_heads * self.value_size
        saved += normed * self.normed
        saved += 4 * e * (self.dense_width + self.shared_width)
        if self.experts and self.float_router:
            saved += 4 * hidden
        if self.whole_scores:
            saved += e * (self.heads * length + 2 * q)
        return saved


@dataclass(frozen=True)
class ModelShape:
    """A language model.

    Attributes:
        hidden, vocabulary, num_experts, top_k, expert_hidden: H, V, E, K, F.
        expert_biases: elements of biases of one expert.
        tied: the head is the embedding.
        window: tokens that layers of kind "window" see.
        groups: of experts, and in how many of them a token chooses.
        sinks: attention has sinks, which no fused kernel knows where ranks share a sequence.
    """

    model_type: str
    hidden: int
    vocabulary: int
    num_experts: int
    top_k: int
    expert_hidden: int
    expert_biases: int
    tied: bool
    window: int
    layers: tuple[LayerShape, ...]
    groups: tuple[int, int] = (1, 1)
    sinks: bool = False

    @property
    def choice(self) -> Choice:
        """Among what a token chooses."""
        return Choice(self.num_experts, self.top_k, *self.groups)

    @classmethod
    def read(cls, keys: Mapping[str, Any], attention: str | None = None) -> ModelShape:
        """From the keys of a config.json.

        Args:
            attention: as `model.attn_implementation`; all but "eager" is fused.

        Raises:
            ValueError: a size is missing, or there are no experts."""
        if isinstance(keys.get("text_config"), Mapping):
            keys = {**keys["text_config"], "tie_word_embeddings": keys.get("tie_word_embeddings", False)}
        return _Reader(keys, attention).shape()

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_hidden + self.expert_biases

    @cached_property
    def moe_layers(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return self.moe_layers * self.num_experts * self.expert_parameters

    @cached_property
    def dense(self) -> int:
        """All other parameters."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return sum(layer.dense_parameters for layer in self.layers) + embeddings + self.hidden

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.dense + self.moe_layers * self.top_k * self.expert_parameters

    @property
    def multiplied(self) -> int:
        """The same without the input embedding."""
        return self.active - (0 if self.tied else self.vocabulary * self.hidden)

    def flops_per_token(self, length: int) -> float:
        """Operations of one token's forward and backward, as `carpool.train.blueprint` counts them."""
        scores = sum(
            layer.heads * (layer.qk_size + layer.value_size) // 2 * self.seen(layer, length) for layer in self.layers
        )
        return 6 * self.multiplied + 12 * scores

    def stages(self, number: int) -> list[range]:
        """The layers of each stage of a pipeline, so that all have as many multiplications, the head's included."""
        if number not in self._cuts:
            of_experts = self.top_k * (self.expert_parameters - self.expert_biases)
            costs = [sum(a * b for a, b in one.products) + one.experts * of_experts for one in self.layers]
            self._cuts[number] = cut(costs, number, last=self.vocabulary * self.hidden)
        return self._cuts[number]

    @cached_property
    def _cuts(self) -> dict[int, list[range]]:
        return {}

    def seen(self, layer: LayerShape, length: int) -> float:
        """Tokens that a token sees in the mean."""
        if layer.kind == "linear":
            return 0.0
        if layer.kind == "window":
            beyond = max(length - self.window, 0)
            return (length**2 - beyond**2) / (2 * length)
        return length / 2

    @cached_property
    def kinds(self) -> Counter[LayerShape]:
        """How many layers are alike."""
        return Counter(self.layers)


def saved_if_compiled(keys: Mapping[str, Any], length: int) -> float:
    """Of what eager autograd saves of a model's layers, the share that compiled layers save; 1.0 if its sizes cannot be
    read.

    Args:
        keys: of its config.json.
        length: of a sequence."""
    try:
        shape = ModelShape.read(keys)
    except ValueError:
        return 1.0
    both = ([layer.saved_bytes(shape.hidden, length, compiled=yes) for layer in shape.layers] for yes in (True, False))
    compiled, eager = map(sum, both)
    return compiled / eager


class _Reader:
    """Reads keys, and says which one is missing."""

    def __init__(self, keys: Mapping[str, Any], attention: str | None) -> None:
        self.keys, self.attention_is, self.type = keys, attention, str(keys.get("model_type", ""))
        self.family = family(self.type)
        self.hidden = self.need("hidden_size")

    def get(self, *names: str, default: int = 0) -> int:
        for name in names:
            value = self.keys.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def need(self, *names: str) -> int:
        value = self.get(*names, default=-1)
        if value < 1:
            raise ValueError(
                f"the configuration of {self.type or 'this model'} says no {' or '.join(names)}, or no positive whole "
                "number: a plan needs all sizes of a model with routed experts, as a config.json has them"
            )
        return value

    def shape(self) -> ModelShape:
        number, experts = self.need("num_hidden_layers"), self.need(*self.family.experts_keys)
        width = self.expert_width()
        window = self.get("sliding_window") if self.keys.get("use_sliding_window", True) else 0
        return ModelShape(
            model_type=self.type,
            hidden=self.hidden,
            vocabulary=self.need("vocab_size"),
            num_experts=experts,
            top_k=self.need(*self.family.top_k_keys),
            expert_hidden=width,
            expert_biases=2 * width + self.hidden if self.family.expert_biases else 0,
            tied=bool(self.keys.get("tie_word_embeddings", False)),
            window=window,
            layers=self.layers(number, experts, window),
            groups=self.groups(experts),
            sinks=self.family.sinks,
        )

    def groups(self, experts: int) -> tuple[int, int]:
        groups = max(1, self.get("n_group", default=1))
        of_groups = self.get("topk_group", default=groups)
        return (groups, of_groups) if 0 < of_groups < groups and experts % groups == 0 else (1, 1)

    def layers(self, number: int, experts: int, window: int) -> tuple[LayerShape, ...]:
        """Equal ones are one object, which makes it quick to see that they are equal."""
        seen: dict[LayerShape, LayerShape] = {}
        found = (self.layer(i, experts, window) for i in range(number))
        return tuple(seen.setdefault(one, one) for one in found)

    def expert_width(self) -> int:
        return self.need("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")

    def layer(self, number: int, experts: int, window: int) -> LayerShape:
        kind = self.kind(number, window)
        attention, others, more = self.linear() if kind == "linear" else self.attention()
        dense = self.is_dense(number)
        shared = 0 if dense else self.shared_width()
        products = list(attention)
        if dense:
            products += self.mlp(self.dense_width())
        else:
            products.append((self.hidden, experts))
            products += self.mlp(shared) if shared else []
            if "shared_expert_intermediate_size" in self.keys:
                products.append((self.hidden, 1))
            others += experts if self.family.router_bias else 0
        return LayerShape(
            kind=kind,
            products=tuple(products),
            attention_products=len(attention),
            others=others + 2 * self.hidden,
            dense_width=self.dense_width() if dense else 0,
            shared_width=shared,
            float_router=self.family.float_router,
            float_norms=self.family.query_gate,  # families with the one have the other
            whole_scores=self.attention_is == "eager",
            **more,
        )

    def kind(self, number: int, window: int) -> Kind:
        linear = self.keys.get("linear_attn_config")
        if isinstance(linear, Mapping):
            return "full" if number + 1 in linear.get("full_attn_layers", ()) else "linear"
        types = self.keys.get("layer_types")
        if isinstance(types, list) and number < len(types):
            if types[number] in ("linear_attention", "conv"):
                return "linear"
            return "window" if "sliding" in str(types[number]) and window else "full"
        if interval := self.get("full_attention_interval"):
            return "full" if (number + 1) % interval == 0 else "linear"
        return "window" if window else "full"

    def is_dense(self, number: int) -> bool:
        if number < self.get(*self.family.dense_keys) or number in (self.keys.get("mlp_only_layers") or ()):
            return True
        return (number + 1) % self.get("decoder_sparse_step", default=1) != 0

    def dense_width(self) -> int:
        return self.need("intermediate_size")

    def shared_width(self) -> int:
        if (own := self.get("shared_expert_intermediate_size")) > 0:
            return own
        return self.get(*self.family.shared_keys) * self.expert_width()

    def mlp(self, width: int) -> list[tuple[int, int]]:
        return [(self.hidden, width), (self.hidden, width), (width, self.hidden)]

    def attention(self) -> tuple[list[tuple[int, int]], int, dict[str, int]]:
        hidden, heads = self.hidden, self.need("num_attention_heads")
        if rank := self.get("kv_lora_rank"):
            nope, rope = self.need("qk_nope_head_dim"), self.need("qk_rope_head_dim")
            value, low = self.need("v_head_dim"), self.get("q_lora_rank")
            size = nope + rope
            queries = [(hidden, low), (low, heads * size)] if low else [(hidden, heads * size)]
            keys = [(hidden, rank + rope), (rank, heads * (nope + value))]
            more = {"heads": heads, "key_heads": heads, "qk_size": size, "value_size": value, "latent": low + rank}
            return [*queries, *keys, (heads * value, hidden)], low + rank, more
        size = self.get("head_dim", default=hidden // heads)
        key_heads = self.get("num_key_value_heads", default=heads)
        q, k = heads * size, key_heads * size
        gate = 2 if self.family.query_gate else 1
        products = [(hidden, gate * q), (hidden, k), (hidden, k), (q, hidden)]
        others, normed = 0, 0
        if self.keys.get("attention_bias") or self.keys.get("use_bias"):
            others += q + 2 * k + (hidden if self.family.output_bias else 0)
        if self.family.sinks:
            others += heads
        if self.family.qk_norm == "head":
            others, normed = others + 2 * size, q + k
        elif self.family.qk_norm == "all" or self.keys.get("use_qk_norm"):
            others, normed = others + q + k, q + k
        return products, others, {
            "heads": heads, "key_heads": key_heads, "qk_size": size, "value_size": size, "normed": normed,
            "gated": q if self.family.query_gate else 0,
        }  # fmt: skip

    def linear(self) -> tuple[list[tuple[int, int]], int, dict[str, int]]:
        hidden = self.hidden
        config = self.keys.get("linear_attn_config")
        if isinstance(config, Mapping):
            # Kimi Delta Attention: queries, keys, values, two low-rank gates, one rate a head.
            size, heads = int(config["head_dim"]), int(config["num_heads"])
            width, taps = size * heads, int(config.get("short_conv_kernel_size", 4))
            products = [(hidden, width)] * 3 + [(hidden, size), (size, width)] * 2
            products += [(hidden, heads), (width, hidden)]
            others = 3 * width * taps + width + heads + size
            return products, others, {
                "heads": heads, "key_heads": heads, "qk_size": size, "value_size": size,
                "convolved": 3 * width, "decays": width,
            }  # fmt: skip
        # Gated DeltaNet.
        key, value = self.need("linear_key_head_dim"), self.need("linear_value_head_dim")
        key_heads, heads = self.need("linear_num_key_heads"), self.need("linear_num_value_heads")
        k, v, taps = key * key_heads, value * heads, self.get("linear_conv_kernel_dim", default=4)
        products = [(hidden, 2 * k + 2 * v), (hidden, 2 * heads), (v, hidden)]
        others = (2 * k + v) * taps + 2 * heads + value
        return products, others, {
            "heads": heads, "key_heads": key_heads, "qk_size": key, "value_size": value, "convolved": 2 * k + v,
        }  # fmt: skip
