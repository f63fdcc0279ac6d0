"""What differs between families of models, one entry for each family that differs: the only place that names them.

A family is a folder of `transformers.models`, and the model types that its configurations have. Most need no entry:
Transformers says which modules are experts, and experts say what they compute. What it does not say is here, and code
that depends on it reads the field; nothing else compares model types or class names.

    family("gpt_oss").sinks             True: of a model type, as a config.json has it
    family_of(model).router             ends of class names by which the model's routers are found
    family_of_class(type(block))        by the module that defines a class

A family enters from outside the package as one file (`CARPOOL_PLUGINS`), or as an entry point of "carpool.families":

    from carpool.families import Family, register
    register(Family("my_moe", module="my_package.modeling", router=("Switchboard",)))

The planner reads this table too, so it imports neither PyTorch nor Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from carpool.plugins import Registry

__all__ = [
    "FAMILIES",
    "Family",
    "Gate",
    "Logits",
    "MultiToken",
    "ServedExperts",
    "UpcycleTarget",
    "family",
    "family_of",
    "family_of_class",
    "register",
]

_MODELS = "transformers.models."


@dataclass(frozen=True)
class Logits:
    """What a model does to its logits after the output layer.

    Attributes:
        change: "divide" or "multiply" by a number, "cap" (c * tanh(l / c)), or "other", which only its own code does.
        key: of the configuration, the number.
    """

    change: Literal["divide", "multiply", "cap", "other"]
    key: str = ""


@dataclass(frozen=True)
class Gate:
    """A gate function of experts that kernels know.

    Attributes:
        function: its qualified name in the family's module.
        activation: arguments of `carpool.experts.Activation`.
        attributes: further arguments, which are attributes of the experts module.
    """

    function: str
    activation: Mapping[str, Any]
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServedExperts:
    """Where a server finds the adapters of experts in a file (`carpool.train.checkpoints.served_adapter`).

    Attributes:
        block: the module of the experts in a decoder layer.
        names: of the matrices of an expert: gate, up and down, or up and down; empty: it reads peft's two stacks.
    """

    block: str
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MultiToken:
    """How a family's checkpoints name multi-token prediction layers (`carpool.hf.multi_token`). Each is a decoder
    layer that is numbered behind the last one, with these modules in it.

    Attributes:
        key: of the configuration, how many there are.
        embedding_norm, hidden_norm: norms of the two inputs.
        projection: of both to one, the embedding first.
        norm: of the output.
        embedding, head: where files repeat the weights of the model's embedding and output layer.
    """

    key: str = "num_nextn_predict_layers"
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    head: str = "shared_head.head"


@dataclass(frozen=True)
class UpcycleTarget:
    """How a family continues a dense one (`carpool.train.checkpoints.upcycle`).

    Attributes:
        dense: its model type.
        block: the module of a layer that holds the router and the experts, as published checkpoints name it.
        matrices: names of an expert's gate, up and down there.
        size_key: of the configuration, an expert's intermediate size.
        required: keys that the dense configuration may have with these values alone, because the family lacks them.
    """

    dense: str
    block: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    size_key: str = "intermediate_size"
    required: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The defaults are what most families have.

    Attributes:
        name: the folder in `transformers.models`, and a model type.
        types: further model types, such as that of its language model.
        module: the Python module that defines its classes, of a family outside of Transformers.

        router: ends of class names of routers.
        selection_bias: names of the bias that only the selection of experts sees.
        shared_experts: names of experts that serve every token.
        shared_after_routed: blocks call these after the routed ones, on the rows that they were given.
        attention, mlp: names of the modules of a decoder layer.
        experts_norm: names of the norm before experts.
        mixers: words in class names of what mixes tokens, which adapters find attention by.
        gate: the gate of its experts, if it is not the usual one.
        gated: experts have a gate.

        top_k_keys, experts_keys, shared_keys, dense_keys: keys of the configuration for K, E, the number of shared
            experts and of the first layers without experts; the first that is there counts.
        layer_keys: what a configuration needs beside sizes to make an experts module by itself.

        logits: what happens to logits; None: nothing.
        own_positions: positions have several axes, which it numbers itself, or tokens look ahead.
        masks_without_positions: it makes masks without looking at position ids, and takes masks that are made already.
        more_in_mask: layers add to the mask, or the mask alone has their sliding window.
        window_in_mask: the same of layers with a window, which not all of its models have.

        qk_norm: queries and keys have norms "head" by head, or one over "all" heads.
        query_gate: queries come with a gate each.
        sinks: attention has sinks, and cannot take PyTorch's fused attention.
        output_bias: where attention has biases, its output projection has one.
        router_bias, expert_biases: routers and experts have biases.
        float_router: routers compute with float32 copies of their inputs and weights.
        sigmoid_router: their scores are sigmoids of logits, and not a softmax.
        scores_key: of the configuration, which names the function that makes their scores.
        mxfp4: Transformers reads its experts from files in MXFP4.
        served: by name of the server; one that is not here has no adapters of this family's experts, or was not read.
        upcycles: dense families with the same attention, which it continues.
        multi_token: the names of multi-token prediction layers; None: it has none, or none of this structure.
    """

    name: str
    types: tuple[str, ...] = ()
    module: str = ""

    router: tuple[str, ...] = ("Router", "Gate")
    selection_bias: tuple[str, ...] = ("e_score_correction_bias", "expert_bias")
    shared_experts: tuple[str, ...] = ("shared_experts", "shared_expert")
    shared_after_routed: bool = False
    attention: tuple[str, ...] = ("self_attn", "attention", "attn")
    mlp: tuple[str, ...] = ("mlp", "feed_forward", "block_sparse_moe", "moe")
    experts_norm: tuple[str, ...] = ("pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm")
    mixers: tuple[str, ...] = ("Attention", "MLA", "DeltaNet", "Mamba", "Mixer", "ShortConv")
    gate: Gate | None = None
    gated: bool = True

    top_k_keys: tuple[str, ...] = (
        "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts",
        "num_selected_experts", "top_k", "moe_k",
    )  # fmt: skip
    experts_keys: tuple[str, ...] = (
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
    )  # fmt: skip
    shared_keys: tuple[str, ...] = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    dense_keys: tuple[str, ...] = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    layer_keys: Mapping[str, Any] = field(default_factory=dict)

    logits: Logits | None = None
    own_positions: bool = False
    masks_without_positions: bool = False
    more_in_mask: bool = False
    window_in_mask: bool = False

    qk_norm: Literal["", "head", "all"] = ""
    query_gate: bool = False
    sinks: bool = False
    output_bias: bool = True
    router_bias: bool = False
    expert_biases: bool = False
    float_router: bool = False
    sigmoid_router: bool = False
    scores_key: str = ""
    mxfp4: bool = False
    served: Mapping[str, ServedExperts] = field(default_factory=dict)
    upcycles: tuple[UpcycleTarget, ...] = ()
    multi_token: MultiToken | None = None

    def top_k_key(self, config: Any) -> str | None:
        """The key under which a configuration says K as a whole number."""
        return _first_key(config, self.top_k_keys)

    def experts_key(self, config: Any) -> str | None:
        """The same of E."""
        return _first_key(config, self.experts_keys)


def _first_key(config: Any, names: tuple[str, ...]) -> str | None:
    values = ((name, getattr(config, name, None)) for name in names)
    return next((name for name, value in values if isinstance(value, int) and not isinstance(value, bool)), None)


_DIVIDED = Logits("divide", "logits_scaling")
_CLAMPED = Gate(
    "GptOssExperts._apply_gate",
    {"name": "silu", "gated": True, "interleaved": True, "up_shift": 1.0},
    ("limit", "alpha"),
)
_MLP, _SPARSE = ServedExperts("mlp.experts"), ServedExperts("block_sparse_moe.experts")
_W132 = ServedExperts("block_sparse_moe.experts", ("w1", "w3", "w2"))
_BOTH = {"vllm": _MLP, "sglang": _MLP}
_SPARSE_MLP, _W132_NAMES = "block_sparse_moe", ("w1", "w3", "w2")

_TABLE = (
    Family("afmoe", sigmoid_router=True, masks_without_positions=True),
    Family("aria", shared_after_routed=True),
    Family("axk1", sigmoid_router=True, shared_after_routed=True),
    Family("axk2", sigmoid_router=True, shared_after_routed=True),
    Family("bailing_hybrid", sigmoid_router=True, shared_after_routed=True),
    Family("beam", sigmoid_router=True, logits=Logits("other")),
    Family(
        "cohere2_moe", scores_key="expert_selection_fn", shared_after_routed=True,
        logits=Logits("multiply", "logit_scale"),
    ),
    Family("deepseek_ocr2", shared_after_routed=True),
    Family("deepseek_v2", shared_after_routed=True, float_router=True, served=_BOTH),
    Family(
        "deepseek_v3", sigmoid_router=True, shared_after_routed=True, float_router=True, served=_BOTH,
        multi_token=MultiToken(),
    ),
    Family("deepseek_v32", sigmoid_router=True, shared_after_routed=True),
    Family("deepseek_v4", scores_key="scoring_func", shared_after_routed=True),
    Family("diffusion_gemma", own_positions=True),
    Family("doge", more_in_mask=True),
    Family("dots1", sigmoid_router=True, shared_after_routed=True, float_router=True, qk_norm="head"),
    Family("dots3_note", sigmoid_router=True, shared_after_routed=True),
    Family("ernie4_5_moe", float_router=True, router_bias=True, served=_BOTH),
    Family("ernie4_5_vl_moe", own_positions=True),
    Family("exaone_moe", sigmoid_router=True, shared_after_routed=True, qk_norm="head"),
    Family("flex_olmo", qk_norm="all", upcycles=(UpcycleTarget("olmo2"),)),
    Family("flint", sigmoid_router=True, shared_after_routed=True),
    Family("gemma4", logits=Logits("cap", "final_logit_softcapping")),
    Family(
        "glm4_moe", sigmoid_router=True, shared_after_routed=True, float_router=True, output_bias=False, served=_BOTH,
        multi_token=MultiToken(),
    ),
    Family(
        "glm4_moe_lite", sigmoid_router=True, shared_after_routed=True, float_router=True, multi_token=MultiToken(),
    ),
    Family("glm4v_moe", sigmoid_router=True, shared_after_routed=True, own_positions=True),
    Family("glm5_next", sigmoid_router=True, shared_after_routed=True),
    Family("glm_moe_dsa", sigmoid_router=True, shared_after_routed=True),
    Family(
        "gpt_oss", gate=_CLAMPED, masks_without_positions=True, sinks=True, router_bias=True,
        expert_biases=True, mxfp4=True,
        served={"vllm": ServedExperts("mlp.experts", ()), "sglang": _MLP},
    ),
    Family("granitemoe", logits=_DIVIDED, served={"vllm": _SPARSE, "sglang": _SPARSE}),
    Family("granitemoe_swa", logits=_DIVIDED),
    Family("granitemoehybrid", logits=_DIVIDED),
    Family("granitemoeshared", logits=_DIVIDED),
    Family("hunyuan_v1_moe", qk_norm="head"),
    Family("hy_v3", sigmoid_router=True, shared_after_routed=True),
    Family("hy_v4", sigmoid_router=True, shared_after_routed=True),
    Family("inkling", sigmoid_router=True, logits=Logits("other")),
    Family("inkling2", scores_key="scoring_func", logits=Logits("other")),
    Family("jamba", served={"vllm": ServedExperts("feed_forward.experts")}),
    Family("kimi_linear", sigmoid_router=True, shared_after_routed=True, float_router=True),
    Family("kolibri1", sigmoid_router=True, shared_after_routed=True),
    Family("laguna", sigmoid_router=True),
    Family("lfm2_moe", sigmoid_router=True, served={"vllm": ServedExperts("feed_forward.experts", ("w1", "w3", "w2"))}),
    Family("llama4", sigmoid_router=True),
    Family("mimo_v2_flash", sigmoid_router=True),
    Family("minimax_m2", sigmoid_router=True, qk_norm="all", served={"vllm": _W132, "sglang": _SPARSE}),
    Family("minimax_m3_vl", sigmoid_router=True),
    Family("mistral4", shared_after_routed=True),
    Family("mistral_large4", shared_after_routed=True),
    Family(
        "mixtral", served={"vllm": _W132, "sglang": _SPARSE},
        upcycles=(
            UpcycleTarget(
                "llama", _SPARSE_MLP, _W132_NAMES, required={"attention_bias": False, "mlp_bias": False}
            ),
            UpcycleTarget("mistral", _SPARSE_MLP, _W132_NAMES),
        ),
    ),
    Family("muse_spark", sigmoid_router=True),
    Family(
        "nemotron_h", sigmoid_router=True, shared_after_routed=True, gated=False,
        layer_keys={"mlp_hidden_act": "relu2", "moe_latent_size": None},
        served={"vllm": ServedExperts("mixer.experts", ("up_proj", "down_proj"))},
    ),
    Family("olmoe", qk_norm="all", served=_BOTH),
    Family("openai_privacy_filter", own_positions=True),
    Family("phimoe", more_in_mask=True, served={"vllm": _W132, "sglang": _SPARSE}),
    Family("qwen2_moe", window_in_mask=True, served=_BOTH),
    Family("qwen3_5_moe", qk_norm="head", query_gate=True),
    Family(
        "qwen3_moe", qk_norm="head", served=_BOTH,
        upcycles=(
            UpcycleTarget("qwen3", size_key="moe_intermediate_size", required={"use_sliding_window": False}),
        ),
    ),
    Family("qwen3_next", qk_norm="head", query_gate=True),
    Family("qwen3_vl_moe", types=("qwen3_vl_moe_text",), qk_norm="head"),
    Family("solar_open", sigmoid_router=True, shared_after_routed=True),
    Family("step3p7", sigmoid_router=True),
    Family("unlimited_ocr", shared_after_routed=True),
)  # fmt: skip
_OTHER = Family("")


def _check(name: str, entry: Family) -> None:
    if not isinstance(entry, Family) or entry.name != name:
        raise ValueError(f"model family {name!r} ({entry!r}) must be a carpool.families.Family of that name")


FAMILIES: Registry[Family] = Registry("model family", "carpool.families", {one.name: one for one in _TABLE}, _check)
register = FAMILIES.register


def family(model_type: str) -> Family:
    """The family of a model type; that of a type without an entry has the defaults."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    return next((one for one in _importable() if model_type in one.types), _OTHER)


def family_of(model: Any) -> Family:
    """The family of a model of Transformers, or of its configuration."""
    config = getattr(model, "config", model)
    return family(getattr(config, "model_type", None) or "")


def family_of_class(cls: Any) -> Family:
    """The family whose module defines a class or a function. A subclass that a user derives has the defaults."""
    if cls.__module__.startswith(_MODELS):
        return family(cls.__module__.removeprefix(_MODELS).split(".")[0])
    return next((one for one in _importable() if one.module and one.module == cls.__module__), _OTHER)


def _importable() -> Iterator[Family]:
    """All families but those of plug-ins that cannot be imported, which harm only those who name them."""
    for name in FAMILIES:
        with suppress(ImportError):
            yield FAMILIES[name]
