"""From the `[model]` section to what transformers builds, and what is known of it without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from carpool.hf.building.narrow import narrow_experts
from carpool.hf.config.sizes import TOP_K, check_sizes, first_key
from carpool.hf.config.source import make_config, read_config
from carpool.hf.seam.layers import experts_modules
from carpool.plugins.nearest import nearest
from carpool.train.config.published import FROM, read_keys
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.model.implementations import check_attention


def model_config(source: str | Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a published model, for a model from scratch.

    Args:
        source: a short name (`carpool.train.config.published`), the path of a `config.json`, or its keys, which may
            say under `from` which of the former they change.

    Raises:
        ValueError: as `read_keys` and `make_config`, or nothing says its model_type.
    """
    return make_config(*_type_and_keys(source))


def _type_and_keys(source: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    keys = read_keys(source)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        where = source if isinstance(source, str) else source.get(FROM, "the configuration")
        raise ValueError(f"{where} does not say its model_type, hence not what model it is of")
    return model_type, keys


def model_source(config: Config, tokenizer: Tokenizer) -> PreTrainedConfig | Path:
    """What to build: a checkpoint folder, or a transformers configuration for a model from scratch.

    Raises:
        ValueError: an architecture or an attention that transformers does not have, a configuration key that it
            does not know, a vocabulary smaller than the tokenizer's, or settings for a checkpoint, which has its own.
    """
    model = config.model
    check_attention(model)
    keys, model_type = dict(model.config), model.model_type
    if model.path is not None:
        if not model.from_scratch:
            if model.config or model.num_experts_per_tok is not None:
                raise ValueError(
                    "model.config and model.num_experts_per_tok configure a model from scratch, but model.path = "
                    f"{model.path} names a checkpoint, which has a configuration: leave them out, or edit its "
                    "config.json"
                )
            return Path(model.path)
        model_type, keys = _type_and_keys({FROM: model.path, **keys})
    # Of a model with several parts, these are keys of its language model.
    language = keys
    if isinstance(keys.get("text_config"), dict):
        language = keys["text_config"] = dict(keys["text_config"])
    vocabulary = language.setdefault("vocab_size", tokenizer.vocab_size)
    if isinstance(vocabulary, int) and vocabulary < tokenizer.vocab_size:
        raise ValueError(
            f"model.config.vocab_size = {vocabulary} is smaller than the tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}; leave it out to have it taken from the tokenizer"
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # The defaults of a configuration class mean tokens of another vocabulary, and so do those of a published one
        # whose vocabulary was made smaller.
        if key not in language or _is_beyond(language[key], vocabulary):
            language[key] = tokenizer.eos_id if key == "eos_token_id" else None
    if model.num_experts_per_tok is not None:
        language["num_experts_per_tok"] = model.num_experts_per_tok
    made = make_config(model_type or _model_type(model.architecture or ""), keys)
    if model.travel_size is not None:
        made.get_text_config().travel_size = model.travel_size
    return made


def _is_beyond(token: Any, vocabulary: Any) -> bool:
    """Is this id, or one of these, no token of a vocabulary of that size?"""
    tokens = token if isinstance(token, list) else [token]
    return isinstance(vocabulary, int) and any(isinstance(one, int) and one >= vocabulary for one in tokens)


def _model_type(architecture: str) -> str:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    types = {cls: model_type for model_type, cls in names.items()}
    if architecture not in types:
        close = nearest(architecture, list(types))
        hint = f"; did you mean {close}?" if close else ""
        raise ValueError(f"model.architecture = {architecture!r} is no causal language model of transformers{hint}")
    return types[architecture]


def expert_counts(model: PreTrainedModel) -> dict[str, int]:
    """The number of experts in each experts module of an unsharded model.

    Raises:
        ValueError: there are none.
    """
    counts = experts_modules(model)
    if not counts:
        raise ValueError(
            f"{type(model).__name__} has no experts that Carpool can spread over ranks; see docs/models.md for those "
            "that it can, or train this model with transformers alone"
        )
    return counts


def meta_model(source: PreTrainedConfig | Path) -> PreTrainedModel:
    """The model without values: shapes and module names only."""
    config = read_config(source) if isinstance(source, Path) else source
    check_sizes(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        narrow_experts(model, experts_modules(model))
    return model


def top_k_of(model: nn.Module) -> int:
    """K of a transformers model's router."""
    config: Any = model.config
    text = config.get_text_config()
    key = first_key(text, TOP_K)
    if key is None:
        raise ValueError(
            f"{type(model).__name__} does not say how many experts a token visits; tried {', '.join(TOP_K)} of its "
            "config"
        )
    return int(getattr(text, key))
