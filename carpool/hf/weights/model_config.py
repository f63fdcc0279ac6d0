"""A model's configuration: of a checkpoint folder, or of keys for a model from scratch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.families import family, family_of
from carpool.hf.weights.config_keys import check_keys, registered_model, suggestion
from carpool.hf.weights.weight_files import check_weight_files

logger = logging.getLogger(__name__)


def make_config(model_type: str, keys: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a Transformers model type, such as "olmoe", for a model from scratch.

    Args:
        keys: values by the keys of a `config.json`, as published; those of a sub-configuration as a dictionary. Keys
            that mean nothing to Transformers are taken as they are, and one warning names them.

    Raises:
        ValueError: with a line for each: a model type that Transformers does not have, a key that nothing reads (with
            the nearest one), a value that the configuration refuses or that cannot be meant (`impossible_sizes`).
    """
    if model_type not in CONFIG_MAPPING or not (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or registered_model(CONFIG_MAPPING[model_type])
    ):
        known = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
        code = " Its file brings its own code (auto_map), which Carpool never runs." if "auto_map" in keys else ""
        raise ValueError(
            f"Transformers has no causal language model of type {model_type!r}{suggestion(model_type, known)}{code}"
        )
    config_class = CONFIG_MAPPING[model_type]
    used, inert, wrong = check_keys(config_class, keys, model_type)
    try:
        config = config_class(**used)
        wrong += impossible_sizes(config)
    except Exception as error:  # each configuration validates in its own way, and with its own exception
        wrong.append(f"the {model_type} configuration refuses {used}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    if inert and not (dist.is_initialized() and dist.get_rank()):
        quantised = "; the model is not quantised" if "quantization_config" in inert else ""
        logger.warning(
            "these keys mean nothing to a %s model from scratch and are ignored: %s%s",
            model_type,
            ", ".join(inert),
            quantised,
        )
    return config


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder. ValueError: it is no checkpoint, or not one that is safe and
    complete."""
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}")
    if not (folder / "config.json").is_file():
        hint = " (it holds an adapter; merge it into its base model first)" if any(folder.glob("adapter_*")) else ""
        raise ValueError(f"{folder} has no config.json, so it is not a Transformers checkpoint{hint}")
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = raw.get("model_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a JSON object: {error}") from error
    if model_type not in CONFIG_MAPPING:
        code = " It brings its own code (auto_map), which Carpool never runs." if "auto_map" in raw else ""
        raise ValueError(
            f"{folder / 'config.json'} has model_type {model_type!r}, which the installed Transformers does not have"
            f"{suggestion(str(model_type), CONFIG_MAPPING)}.{code}"
        )
    # Experts in MXFP4 are read as they are; who would train them refuses (`carpool.train.plan.start_checks`).
    method = (raw.get("quantization_config") or {}).get("quant_method", "unknown method")
    if raw.get("quantization_config") and not (method == "mxfp4" and family(model_type).mxfp4):
        raise ValueError(
            f"the weights in {folder} are quantised ({method}), and quantised weights cannot be trained; "
            "save the model dequantised first (`model.dequantize()`)"
        )
    check_weight_files(folder, raw)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration validates in its own way, and with its own exception
        raise ValueError(f"the {model_type} configuration refuses {folder / 'config.json'}: {error}") from error
    if hasattr(config, "quantization_config"):
        # The model is built without: its layers are Carpool's.
        del config.quantization_config
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Sizes in a model's configuration: what cannot be meant, and the sizes of its heads.
#
# What cannot be meant is refused before anything is built, with the key and the value. Transformers builds such models,
# or fails with a division by zero, a negative dimension or a shape that does not fit, depending on the model and often
# only in the first forward.

_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_ACTIVATIONS = ("hidden_act", "hidden_activation")


def check_sizes(config: PreTrainedConfig) -> None:
    """Look at the sizes of a model's configuration, or of its language model's.

    Raises:
        ValueError: what `impossible_sizes` says, a line each.
    """
    if wrong := impossible_sizes(config):
        raise ValueError("\n".join(wrong))


def impossible_sizes(config: PreTrainedConfig) -> list[str]:
    """Sentences about sizes below 1, activations that Transformers does not have, drop-out of all, more experts for a
    token than there are, and attention heads that do not divide the hidden size or among each other."""
    text: Any = config.get_text_config()
    kind = text.model_type

    def size(key: str) -> int | None:
        value = getattr(text, key, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    known = family_of(text)
    top_k_key, experts_key = known.top_k_key(text), known.experts_key(text)
    keys = [key for key in (*_POSITIVE, top_k_key, experts_key) if key is not None]
    wrong = [
        f"{key} = {value} in the {kind} configuration must be at least 1"
        for key in keys
        if (value := size(key)) is not None and value < 1
    ]
    wrong += [
        f"{key} = {value!r} in the {kind} configuration is no activation of Transformers{suggestion(value, ACT2FN)}"
        for key in _ACTIVATIONS
        if isinstance(value := getattr(text, key, None), str) and value not in ACT2FN
    ]
    wrong += [
        f"{key} = {value} in the {kind} configuration must be at least 0 and below 1"
        for key, value in vars(text).items()
        if key.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)) and not 0 <= value < 1
    ]
    if wrong:
        return wrong
    if top_k_key is not None and experts_key is not None:
        top_k, experts = getattr(text, top_k_key), getattr(text, experts_key)
        if top_k > experts:
            wrong.append(
                f"{top_k_key} = {top_k} in the {kind} configuration is more than its {experts_key} = {experts}: a "
                "token cannot choose more experts than there are"
            )
    hidden, heads, pairs = size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads")
    if hidden is None or heads is None:
        return wrong
    if pairs is not None and heads % pairs:
        wrong.append(
            f"num_attention_heads = {heads} in the {kind} configuration is no multiple of its num_key_value_heads = "
            f"{pairs}"
        )
    # Latent attention has sizes of heads of its own; others may say head_dim.
    own = size("qk_head_dim") is not None or size("head_dim") not in (None, hidden // heads)
    if hidden % heads and not own:
        wrong.append(
            f"hidden_size = {hidden} in the {kind} configuration is no multiple of its num_attention_heads = {heads}, "
            "so the size of a head is no whole number: change one of them, or set head_dim"
        )
    return wrong


def head_sizes(text: Any) -> tuple[int, int]:
    """The sizes of an attention head of a language model's configuration: (of queries and keys, of values). 0 if it has
    no attention.

    Example: Qwen3-30B-A3B says head_dim = 128, which is not its hidden_size / num_attention_heads = 64. The latent
    attention of DeepSeek-V3 puts qk_nope_head_dim = 128 and qk_rope_head_dim = 64 beside each other; v_head_dim is 128.
    """
    heads = getattr(text, "num_attention_heads", 0)
    if getattr(text, "qk_nope_head_dim", None):
        query = int(text.qk_nope_head_dim + text.qk_rope_head_dim)
    else:
        query = int(getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0))
    return query, int(getattr(text, "v_head_dim", None) or query)
