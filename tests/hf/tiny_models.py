"""Every MoE model of the installed transformers, small enough to train on a laptop, found rather than listed.

Transformers keeps one folder per architecture (`transformers/models/olmoe/`). `discover` reads the source of all of
them, without importing any, and keeps those that define experts: a class decorated with
`@use_experts_implementation`, a module class named like an MoE, or a module that holds `self.experts`. So an
architecture that a later transformers adds appears here by itself, and `test_every_model.py` fails until it either
passes parity or is given a reason in `EXCEPTIONS`.

For each folder, `discover` picks the class that a person would train, through transformers' own Auto mappings: the
causal language model if there is one, else the multimodal, encoder-decoder or token-classification class.

`tiny_config` makes the configuration small by *field name*: the tables `SIZES` (language models) and `TOWERS` (vision
and audio towers beside them) say what `hidden_size`, `num_experts` and so on become wherever a configuration class
has such a field, nested ones included. `EXTRAS` holds the few values that one architecture insists on.

Weights are drawn wider than transformers initialises them (`initializer_range` 0.2, then noise of 0.05 on every
parameter, so that none is left at an exact 0 or 1, where a wrong gradient could hide). That keeps the routers'
scores well apart: expert choices then differ by far more than float32 rounding, and a different summation order on
another number of ranks cannot flip a top-k.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCAB_SIZE = 96
NUM_SEQUENCES = 4
SEQUENCE_LENGTH = 11

# Which Auto mapping to prefer when an architecture has several classes.
_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")
_SIGNS_OF_EXPERTS = re.compile(
    r"^@use_experts_implementation|^class \w*(?:MoE|Moe|Experts?)\w*\(nn\.Module|self\.experts\s*=", re.MULTILINE
)
_MODEL_TYPE = re.compile(r'^    model_type(?:: str)? = "([^"]+)"', re.MULTILINE)

# What these fields become in every language model's configuration that has them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "use_cache": False,
    # widths
    "hidden_size": 32, "d_model": 32, "hidden_size_per_layer_input": 8, "intermediate_size": 32, "d_ff": 32,
    "ffn_hidden_size": 32, "dense_intermediate_size": 32, "intermediate_size_mlp": 32, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "share_expert_dim": 16,
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "moe_hidden_size": 32, "router_hidden_size": 16,
    "projector_hidden_size": 32, "out_hidden_size": 32, "hc_lowrank": 8,
    # layers: two, both MoE
    "num_hidden_layers": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "first_k_dense_replace": 0, "num_dense_layers": 0, "moe_layer_start_index": 0,
    "mlp_only_layers": [], "mlp_layer_types": ["sparse", "sparse"], "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    # attention
    "num_attention_heads": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "d_kv": 8, "kv_channels": 8, "swa_head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_sliding_attention_heads": 4,
    "sliding_window": 8, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 32, "q_lora_rank": 16,
    "kv_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
    # linear attention and state-space layers
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
    "mamba_chunk_size": 8,
    # experts and routing; no router noise, and no balance loss, whose statistics the models take per rank
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "zero_expert_num": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "top_k_experts": 2, "enable_moe_block": True,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "output_router_logits": False, "router_jitter_noise": 0.0,
    # nothing random in a forward
    "dropout": 0.0, "dropout_rate": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "moe_token_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "initializer_range": 0.2,
}  # fmt: skip

# And in the vision and audio towers beside them, which text-only input never enters.
TOWERS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "hidden_size": 32, "d_model": 32,
    "intermediate_size": 32, "mlp_dim": 32, "encoder_ffn_dim": 32, "num_hidden_layers": 1, "depth": 1,
    "encoder_layers": 1, "num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "encoder_attention_heads": 4, "head_dim": 8, "patch_size": 4, "image_size": 16, "window_size": 2,
    "output_channels": 32, "out_hidden_size": 32, "output_dim": 32, "adapter_in_dim": 32, "adapter_out_dim": 32,
    "text_hidden_size": 32, "downsample_hidden_size": 8, "downsample_channels": [32, 32],
    "position_embedding_size": 16, "num_position_embeddings": 16, "projection_intermediate_size": 32,
    "projection_hidden_dim": 32, "projector_hidden_size": 32, "deepstack_visual_indexes": [0],
    "depths": (1, 1, 1, 1), "hidden_sizes": (32, 32, 32, 32), "num_local_experts": 8, "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}  # fmt: skip

# What one architecture insists on: by configuration class, since configurations nest.
EXTRAS: dict[str, dict[str, Any]] = {
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekV4Config": {"mlp_layer_types": ["hash_moe", "moe"]},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [16, 16],  # of the text experts and of the vision experts
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "Glm4vMoeTextConfig": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        }
    },
    "Glm5NextTextConfig": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashConfig": {"num_key_value_heads": 2},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "SwitchTransformersConfig": {"decoder_start_token_id": 0},
    "ZayaConfig": {"num_experts_per_tok": 1},  # the only value it knows
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MoEArchitecture:
    """One folder of `transformers.models` that defines experts, and the class of it that is tested.

    `model_type` and `class_name` are empty where transformers offers no class of a kind that we could train.
    """

    folder: str
    model_type: str
    class_name: str

    @property
    def model_class(self) -> type[PreTrainedModel]:
        model_class = getattr(transformers, self.class_name)
        assert issubclass(model_class, PreTrainedModel)
        return model_class


@functools.cache
def discover() -> dict[str, MoEArchitecture]:
    """Every folder of the installed transformers that defines experts, by its name (half a second, once)."""
    found = {}
    for folder in sorted(Path(transformers.__file__).parent.joinpath("models").iterdir()):
        sources = [path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py")]
        if not any(_SIGNS_OF_EXPERTS.search(source) for source in sources):
            continue
        configs = [path.read_text(encoding="utf-8") for path in folder.glob("configuration_*.py")]
        model_types = [name for source in configs for name in _MODEL_TYPE.findall(source)]
        found[folder.name] = MoEArchitecture(folder.name, *_preferred_class(model_types))
    return found


def _preferred_class(model_types: list[str]) -> tuple[str, str]:
    for task in _TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for model_type in model_types:
            if model_type in mapping:
                return model_type, mapping[model_type]
    return "", ""


def tiny_config(architecture: MoEArchitecture, **overrides: Any) -> PreTrainedConfig:
    """The architecture's configuration with every size that `SIZES` and `TOWERS` know made small.

    `overrides` replace values of the outermost configuration.
    """
    config_class = CONFIG_MAPPING[architecture.model_type]
    config = config_class(**(_small_values(config_class, SIZES) | overrides))
    assert isinstance(config, PreTrainedConfig)
    return config


def _small_values(config_class: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in sizes.items() if name in fields}
    for name, spec in (config_class.sub_configs_defaults or config_class.sub_configs).items():
        # A nested configuration is given as its class, or as "whatever AutoConfig makes of this model type".
        nested = spec if isinstance(spec, type) else spec.config_class
        if not dataclasses.is_dataclass(nested):
            nested = CONFIG_MAPPING[spec.model_type]
        values[name] = _small_values(nested, TOWERS if name in ("vision_config", "audio_config") else sizes)
    return values | EXTRAS.get(config_class.__name__, {})


def tiny_model(architecture: MoEArchitecture, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of that configuration in float32, with random weights that depend on the seed alone."""
    torch.manual_seed(seed)
    model = architecture.model_class(tiny_config(architecture, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts serve a token id: all of them expert 0, as it starts
                buffer.copy_(torch.rand(buffer.shape[0], 8).argsort(dim=1)[:, : buffer.shape[1]])
    return model


def tiny_batch(model: PreTrainedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """`NUM_SEQUENCES` different sequences without special tokens or padding, as arguments of the model's forward."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (NUM_SEQUENCES, SEQUENCE_LENGTH), generator=generator)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
    labels = ids % (model.config.num_labels or 1) if "TokenClassification" in type(model).__name__ else ids
    return {"input_ids": ids, "labels": labels}
