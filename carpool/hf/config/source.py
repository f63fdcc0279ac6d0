"""A model's configuration: of a checkpoint folder, or of keys for a model from scratch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from carpool.hf.config.keys import check_keys, registered_model, suggestion
from carpool.hf.config.sizes import impossible_sizes
from carpool.hf.weights.files import check_weight_files

logger = logging.getLogger(__name__)


def make_config(model_type: str, keys: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a Transformers model type, for a model from scratch.

    Args:
        model_type: as in `config.json`, for example "olmoe" or "qwen3_moe".
        keys: values by the keys of a `config.json`, as published; those of a sub-configuration as a dictionary. Keys
            that are known to mean nothing to Transformers are taken as they are, and one warning names them.

    Raises:
        ValueError: for a model type that Transformers does not have, a key that nothing reads (with the nearest one
            that something does), or a value that the configuration refuses or that cannot be meant
            (`carpool.hf.config.sizes`). The message has a line for each of them.
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
    """The configuration of a checkpoint folder.

    Raises:
        ValueError: the folder is no checkpoint, or not one that is safe and complete enough to read.
    """
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
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(
            f"the weights in {folder} are quantised ({method}), and quantised weights cannot be trained; "
            "save the model dequantised first (`model.dequantize()`)"
        )
    check_weight_files(folder, raw)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration validates in its own way, and with its own exception
        raise ValueError(f"the {model_type} configuration refuses {folder / 'config.json'}: {error}") from error
