"""Which keys a model reads from its configuration, and which of somebody's keys nothing reads.

Transformers' configuration classes take any key, so a misspelt one changes nothing and nobody notices. A model reads
more than its class declares (Qwen3-30B-A3B's `head_dim`), so the source of both is read, as a syntax tree:

    class Qwen3NextConfig: ... kwargs.pop("full_attention_interval", 4)        the class reads full_attention_interval
    self.head_dim = getattr(config, "head_dim", ...)                           the model reads head_dim

A published config.json also has keys that only its authors' code reads, or that are about the file; these are listed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.plugins.nearest import nearest_names

# Spellings of rotary settings that Transformers still takes and folds into `rope_parameters`.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
# About a file and its weights: where they are from, their dtype, their quantisation. A model from scratch has none.
_FILE_KEYS = frozenset({
    "_name_or_path", "architectures", "auto_map", "dtype", "expert_dtype", "quantization_config", "torch_dtype",
    "transformers_version",
})  # fmt: skip
# Published keys of mixtures of experts that some model of Transformers does not read: it computes their usual value
# always, or what they speak of (prediction of further tokens, capacities, dropped losses) is not part of it.
_AUTHORS_KEYS = frozenset({
    "attn_output_gate", "attn_type_list", "aux_loss_alpha", "deepstack_visual_indexes", "ep_size", "experts_per_token",
    "first_k_dense_replace", "head_dim", "index_share_for_mtp_iteration", "indexer_rope_interleave",
    "initial_context_length", "mamba_ssm_dtype", "max_window_layers", "mla_use_nope", "mlp_only_layers", "moe_capacity",
    "moe_gate", "moe_gate_act", "moe_layer_freq", "moe_router_activation_func", "moe_router_dtype", "moe_use_aux_free",
    "mtp_num_hidden_layers", "mtp_transformer_layers", "mtp_use_dedicated_embeddings", "multi_token_pred_lambda",
    "norm_eps", "num_mtp_modules", "num_nextn_predict_layers", "pretraining_tp", "qk_head_dim", "qk_norm_type",
    "rope_interleave", "router_jitter_noise", "scoring_func", "seq_aux", "shared_intermediate_size", "topk_method",
    "use_grouped_topk", "use_mtp", "use_qk_norm", "use_routing_bias", "use_sliding_window", *_ROPE_KEYS,
})  # fmt: skip
# What a model of Transformers may not have, and a file may say that it is off.
_OFF_KEYS = frozenset({"qkv_bias", "shared_expert_intermediate_size"})


def check_keys(
    config_class: type[PreTrainedConfig], keys: dict[str, Any], where: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Somebody's keys for a configuration class of transformers, checked one by one. `where`: the model type, for
    messages.

    Returns:
        (the keys that the configuration takes, the names of those that nothing reads, what is wrong with others as
        sentences). What only the authors' code reads is in both: a model that was trained may be served by that code.
    """
    declared = {field.name for field in dataclasses.fields(config_class)}
    declared |= config_class.attribute_map.keys() | set(config_class.attribute_map.values())
    if "rope_parameters" in declared:
        declared.update(_ROPE_KEYS)
    known = declared - _FILE_KEYS | ({"model_type"} if "." in where else set())
    if not keys.keys() <= known:
        known |= keys_read(config_class)
    used: dict[str, Any] = {}
    inert: list[str] = []
    wrong: list[str] = []
    for key, value in keys.items():
        means_nothing = key in _AUTHORS_KEYS or (key in _OFF_KEYS and not value)
        if key in _FILE_KEYS or (key == "rope_scaling" and key not in known):
            inert.append(key)
        elif key not in known and means_nothing:
            inert.append(key)
            used[key] = value
        elif key not in known:
            wrong.append(f"the configuration of {where} has no key {key!r}{suggestion(key, known)}")
        elif isinstance(value, dict) and (sub_config := _sub_config(config_class, key)) is not None:
            used[key], more, faults = check_keys(sub_config, value, f"{where}.{key}")
            inert += [f"{key}.{name}" for name in more]
            wrong += faults
        elif fault := _fault(config_class, key, value):
            wrong.append(f"the configuration of {where} refuses {key} = {value!r}: {fault}")
        else:
            used[key] = value
    return used, inert, wrong


def suggestion(name: str, known: Iterable[str]) -> str:
    """A question for the end of a refusal, or nothing if no known name is near."""
    matches = nearest_names(name, known, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def keys_read(config_class: type[PreTrainedConfig]) -> set[str]:
    """The keys that the code of a configuration class and of its model reads, declared or not."""
    found = {"tie_word_embeddings"}  # transformers' base class of models reads it
    for cls in config_class.__mro__:
        if issubclass(cls, PreTrainedConfig) and cls is not PreTrainedConfig:
            found |= set(_read_from_kwargs(_parse(cls)))
    # In a module of a model with a configuration for each part, `config.text_config.hidden_size` is the part's.
    names = ("config",) if config_class.sub_configs else ("config", "text_config")
    parts = [_sub_config(config_class, key) for key in config_class.sub_configs]
    of_parts = {field.name for part in parts if part is not None for field in dataclasses.fields(part)}
    for source in _model_sources(config_class):
        tree = _without_classes_of_others(_parse(source), {cls.__name__ for cls in config_class.__mro__})
        found |= set(_read_from_config(tree, names)) - of_parts
    return {key for key in found if not key.startswith("_")}


def _sub_config(config_class: type[PreTrainedConfig], key: str) -> type[PreTrainedConfig] | None:
    cls = config_class.sub_configs.get(key)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedConfig) else None


def _fault(config_class: type[PreTrainedConfig], key: str, value: Any) -> str | None:
    """What the class's own check of this field's type says, if it has one."""
    name = config_class.attribute_map.get(key, key)
    for validate in getattr(config_class, "__validators__", {}).get(name, []):
        try:
            validate(value)
        except (TypeError, ValueError) as error:
            return str(error)
    return None


def _model_sources(config_class: type[PreTrainedConfig]) -> Iterator[Any]:
    """The module that defines the model, and the functions of transformers' other modules that it imports."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config_class.model_type)
    model_class = registered_model(config_class) if name is None else getattr(transformers, name)
    if model_class is not None:
        module = sys.modules[model_class.__module__]
    else:  # a sub-configuration: its model is in the file beside it
        __import__(modeling := config_class.__module__.replace("configuration_", "modeling_"))
        module = sys.modules[modeling]
    yield module
    for value in vars(module).values():
        elsewhere = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and elsewhere.startswith("transformers.") and elsewhere != module.__name__:
            yield inspect.unwrap(value)


def registered_model(config_class: type[PreTrainedConfig] | None) -> type | None:
    """The causal language model that somebody has registered for a configuration class outside of Transformers."""
    found: type | None = MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.get(config_class)
    return found


def _parse(source: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(source)))


def _read_from_kwargs(tree: ast.AST) -> Iterator[str]:
    """`kwargs.get("key")`, `kwargs.pop("key")`, `kwargs["key"]`, `"key" in kwargs`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                yield key
            case ast.Subscript(value=ast.Name(id="kwargs"), slice=ast.Constant(value=str(key))):
                yield key
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id="kwargs")]):
                yield key


def _read_from_config(tree: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    """`config.key`, `self.config.key`, `getattr(config, "key", ...)`, `hasattr(config, "key")`."""

    def is_config(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id in names) or (
            isinstance(node, ast.Attribute) and node.attr in names
        )

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=key, ctx=ast.Load()) if is_config(value):
                yield key
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(key)), *_]) if (
                is_config(value)
            ):
                yield key


def _without_classes_of_others(tree: ast.Module, ours: set[str]) -> ast.Module:
    """The module without the classes whose constructors take another configuration, such as that of a vision tower."""

    def takes_another(node: ast.stmt) -> bool:
        return isinstance(node, ast.ClassDef) and any(
            isinstance(arg.annotation, ast.Name)
            and arg.annotation.id.endswith("Config")
            and arg.annotation.id not in ours
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
            for arg in method.args.args
            if arg.arg == "config"
        )

    tree.body = [node for node in tree.body if not takes_another(node)]
    return tree
