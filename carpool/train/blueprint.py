"""A model before it is built: what transformers builds for a `[model]` section, its shapes and names, what follows from
them, and which implementation computes its attention.

Floating-point operations of a training step, for MFU and HFU. Definitions (PaLM, arXiv 2204.02311, appendix B):
  - MFU, model FLOPs utilisation: the operations that the mathematics of the step needs, per second, over the peak
    of the device. A matrix product of m x k by k x n needs 2mkn; a parameter that a token meets costs 2 forward and 4
    backward, so 6 per token.
  - HFU, hardware FLOPs utilisation: the same with what is computed again counted again (activation checkpointing runs
    the forward twice).

What counts: active parameters only (K of E experts; the input embedding is a table, not a product, the output head
counts), and the part of the score matrix that is needed: half of it for causal attention, a band for sliding windows,
and none of it where attention is linear, whose own states are not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from carpool.families import family_of
from carpool.hf.architecture_changes import Changes, add_change, change_architecture, change_checkpoint, row_size
from carpool.hf.documents import DOCUMENTS, fused_attention, why_no_bounds
from carpool.hf.multi_token import multi_token_layers, stored_layers, unknown_weights
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.weights.model_config import check_sizes, head_sizes, make_config, read_config
from carpool.hf.weights.weight_files import stored_weights
from carpool.parallel.degrees import Degrees
from carpool.planner.machine.hardware import hardware_of
from carpool.plugins.nearest import did_you_mean
from carpool.train.config.published import FROM, read_keys
from carpool.train.config.schema import Config, ModelSection
from carpool.train.data.formats import are_packed
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.extensions import extensions_in_use


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, counted once whatever the sharding.

    Attributes:
        experts: those of routed experts.
        active: those that one token meets: all but the experts that it does not choose.
        multiplied: active without the input embedding.
        attention: sum over layers that see the whole sequence of heads * head size, for the score products; the mean of
            the sizes of keys and values where they differ.
        windowed: the same sum over layers that see `window` tokens.
        window: tokens.
    """

    total: int
    experts: int
    active: int
    multiplied: int
    attention: int
    windowed: int = 0
    window: int = 0

    @property
    def visited(self) -> int:
        """Parameters of the experts that one token chooses."""
        return self.active - (self.total - self.experts)


# Names in transformers' `layer_types` of layers without a score matrix, and of those that see a window of it.
_WITHOUT_SCORES = ("linear_attention", "conv", "moe")
_WINDOWED = ("sliding_attention", "hybrid_sliding")


def model_size(model: nn.Module, expert_modules: dict[str, int], top_k: int) -> ModelSize:
    """Count a transformers model's parameters. It may be sharded (DTensors count in full) or on the meta device.
    `expert_modules`: number of all experts by module name; `top_k`: K."""
    total = sum(p.numel() for p in model.parameters())
    experts, active_experts = 0, 0
    for name, number in expert_modules.items():
        size = sum(p.numel() for p in model.get_submodule(name).parameters())
        experts += size
        active_experts += size * min(top_k, number) // number
    active = total - experts + active_experts
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    width = getattr(config, "num_attention_heads", 0) * sum(head_sizes(config)) // 2
    window = getattr(config, "sliding_window", None) or 0
    everywhere = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    scoring = [kind for kind in kinds if kind not in _WITHOUT_SCORES]
    windowed = sum(kind in _WINDOWED for kind in scoring) if window else 0
    # Each has attention of its own, and multiplies by the output layer once more.
    further = len(multi_token_layers(model))
    multiplied = (active if tied else active - embedding.numel()) + further * embedding.numel()
    return ModelSize(
        total=total, experts=experts, active=active, multiplied=multiplied,
        attention=(len(scoring) - windowed + further) * width, windowed=windowed * width, window=window,
    )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Of the parameters that one token meets: matrices whose gradients are not computed, and adapters beside them.

    Attributes:
        frozen_experts, frozen: of routed experts, and of all else that multiplies.
        expert_adapters, adapters: the same of adapters, which `ModelSize` does not count.
        updated: all elements that are trained, of all experts.
    """

    updated: int

    frozen_experts: int = 0
    frozen: int = 0
    expert_adapters: int = 0
    adapters: int = 0


def flops_per_token(size: ModelSize, sequence_length: int, trained: Trained | None = None) -> int:
    """Operations of one token's forward and backward: 6 for each parameter that multiplies it, and 4 for one that is
    frozen, which has no gradient of its own. `trained`: None: all of the model.

    Example: 1000 parameters, 2 layers of 8 heads * 4, sequence 16: 6 * 1000 + 12 * 64 * 8 = 12,144. The scores and
    their product with the values take 2 * heads * head size each for a token that is seen, and twice that in the
    backward; a token sees 8 others in the mean, or fewer through a window.
    """
    beyond = max(sequence_length - size.window, 0)
    seen, seen_through_window = sequence_length / 2, (sequence_length**2 - beyond**2) / (2 * sequence_length)
    weights = 6 * size.multiplied
    if trained is not None:
        weights += 6 * (trained.expert_adapters + trained.adapters) - 2 * (trained.frozen_experts + trained.frozen)
    return int(weights + 12 * (size.attention * seen + size.windowed * seen_through_window))


def peak_flops(device: torch.device, override: float | None) -> tuple[float | None, str]:
    """The device's peak rate in FLOP/s and where the number is from; None where it is not known."""
    if override is not None:
        return override, "training.peak_flops"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        profile = hardware_of(name)
        if profile.peak_flops is not None:
            return profile.peak_flops, f"datasheet of {profile.name}, dense bf16"
        return None, f"no known peak for {name}: set training.peak_flops to see MFU"
    return None, "no peak is taken for CPUs"


def model_config(source: str | Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a published model, for a model from scratch.

    Args:
        source: a short name (`carpool.train.config.published`), the path of a `config.json`, or its keys, which may
            say under `from` which of the former they change."""
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
    for extension in extensions_in_use(config):
        extension.change_model(made)
        if settings := extension.architecture_settings():
            add_change(made, extension.name, settings)
    return made


def checkpoint_changes(config: Config) -> Changes:
    """How a run has changed the architecture of its checkpoint's model. That of a model from scratch is in its
    configuration."""
    used = [] if config.model.from_scratch else extensions_in_use(config)
    return {one.name: settings for one in used if (settings := one.architecture_settings())}


def _is_beyond(token: Any, vocabulary: Any) -> bool:
    """Is this id, or one of these, no token of a vocabulary of that size?"""
    tokens = token if isinstance(token, list) else [token]
    return isinstance(vocabulary, int) and any(isinstance(one, int) and one >= vocabulary for one in tokens)


def _model_type(architecture: str) -> str:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    types = {cls: model_type for model_type, cls in names.items()}
    if architecture not in types:
        hint = did_you_mean(architecture, types)
        raise ValueError(f"model.architecture = {architecture!r} is no causal language model of transformers{hint}")
    return types[architecture]


def expert_counts(model: PreTrainedModel) -> dict[str, int]:
    """The number of experts in each experts module of an unsharded model. Raises ValueError if there are none."""
    counts = experts_modules(model)
    if not counts:
        raise ValueError(
            f"{type(model).__name__} has no experts that Carpool can spread over ranks; see docs/models.md for those "
            "that it can, or train this model with transformers alone"
        )
    return counts


def meta_model(source: PreTrainedConfig | Path, changes: Changes | None = None) -> PreTrainedModel:
    """The model without values: shapes and module names only. `changes`: of the architecture of a folder's model."""
    config = read_config(source) if isinstance(source, Path) else source
    check_sizes(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        if changes and isinstance(source, Path):
            change_checkpoint(model, changes, stored_weights(source))
        else:
            change_architecture(model)
    return model


def top_k_of(model: nn.Module) -> int:
    """K of a transformers model's router."""
    config: Any = model.config
    text = config.get_text_config()
    known = family_of(text)
    key = known.top_k_key(text)
    if key is None:
        raise ValueError(
            f"{type(model).__name__} does not say how many experts a token visits; tried "
            f"{', '.join(known.top_k_keys)} of its config"
        )
    return int(getattr(text, key))


@dataclass(frozen=True)
class Blueprint:
    """The model of a run without values.

    Attributes:
        source: what is built: a checkpoint folder, or a configuration for a model from scratch.
        changes: of the architecture of a folder's model.
        model: on the meta device.
        expert_counts: E of each experts module, by name.
    """

    source: PreTrainedConfig | Path
    model: PreTrainedModel
    expert_counts: dict[str, int]
    top_k: int
    size: ModelSize
    changes: Changes = field(default_factory=dict)

    @classmethod
    def of(cls, source: PreTrainedConfig | Path, changes: Changes | None = None) -> Blueprint:
        """Raises ValueError for a model without experts, or one whose configuration does not go together."""
        model = meta_model(source, changes)
        counts, top_k = expert_counts(model), top_k_of(model)
        return cls(source, model, counts, top_k, model_size(model, counts, top_k), changes or {})

    @classmethod
    def of_config(cls, config: Config, tokenizer: Tokenizer) -> Blueprint:
        """Raises ValueError as `model_source` and `of`."""
        return cls.of(model_source(config, tokenizer), checkpoint_changes(config))

    @property
    def left_out(self) -> str:
        """What of a checkpoint is not in the model; "": nothing that matters."""
        if not isinstance(self.source, Path):
            return ""
        config, stored = self.model.config, stored_weights(self.source)
        if unknown := unknown_weights(config, stored):
            return (
                f"multi-token prediction: {len(unknown)} weights of {self.source} ({unknown[0]}, ...) are in MTP "
                "layers, which are left out: neither trained nor saved"
            )
        here, there = len(multi_token_layers(self.model)), stored_layers(config, stored)
        if there <= here:
            return ""
        return (
            f"multi-token prediction: {there - here} of the {there} MTP layers of {self.source} are left out: "
            f"neither trained nor saved; mtp.depth={there} trains them"
        )

    @property
    def architecture(self) -> str:
        """The class of Transformers, as it is called before FSDP renames it."""
        return type(self.model).__name__

    def balance_loss(self, weight: float | None) -> tuple[float, str]:
        """The weight of the balance loss, and what says so. A checkpoint is fine-tuned as Transformers' Trainer and TRL
        do: without such a loss, unless its configuration has `output_router_logits`. A model from scratch needs one.

        Args:
            weight: `moe.router_aux_loss_coef`; None: nothing was said."""
        if weight is not None:
            return weight, "moe.router_aux_loss_coef"
        config = self.model.config
        own = getattr(config, "router_aux_loss_coef", None) or 0.0
        if own and isinstance(self.source, Path) and not getattr(config, "output_router_logits", False):
            return 0.0, "the checkpoint's output_router_logits is false; moe.router_aux_loss_coef sets a weight"
        return own, "the model's own router_aux_loss_coef" if own else "the model's configuration has no weight for one"

    @property
    def row_size(self) -> int:
        """Elements of a row that travels."""
        return row_size(self.model.config)

    def why_long(self, tokens: int) -> str | None:
        """What is odd about sequences of so many tokens, in words; None: nothing. Longer ones than a model was made for
        may be meant, and compute."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(most, int) or not 0 < most < tokens:
            return None
        return (
            f"sequences of {tokens:,} tokens (data.sequence_length) are longer than the {most:,} that the model is "
            "made for (its max_position_embeddings)"
        )

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


def attention_of(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """What computes attention, as Transformers names it; None: its default."""
    if config.model.attn_implementation is not None:
        return config.model.attn_implementation
    packed, training = are_packed(config.data), config.training
    # Not shown to be right, or bitwise repeatable, with these.
    unsure = degrees.cp > 1 or training.full_determinism
    if packed and not unsure:
        half = config.model.stored_dtype == "bfloat16" or training.computes_in_bf16(cuda)
        # Without a GPU the host reads where documents end, which no compiled layer can.
        compiled = training.compiled and not cuda
        return None if compiled or why_no_bounds(model, cuda, half) else DOCUMENTS
    return fused_attention(model) if cuda and not packed and not unsure else None


def planned_attention(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """The same as the planner reads it (`carpool.planner.model.shape`), to which what is not "eager" is fused."""
    return attention_of(config, degrees, model, cuda) or ("eager" if fused_attention(model) else None)


def check_attention(model: ModelSection) -> None:
    """Raise ValueError for an attention that transformers does not know. Those with a slash are its kernels."""
    name, known = model.attn_implementation, ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if name is not None and name not in known and "/" not in name:
        hint = did_you_mean(name, known)
        raise ValueError(f"model.attn_implementation = {name!r}: expected one of {', '.join(sorted(known))}{hint}")


def check_implementations(section: ModelSection, model: PreTrainedModel) -> None:
    """Raise ValueError for attention or experts that this model, or this machine, does not have. What names a kernel of
    a repository (with a slash) is known when it is loaded."""
    if (name := section.attn_implementation) is not None and "/" not in name:
        with _refused(f"model.attn_implementation = {name!r}"):
            model.get_correct_attn_implementation(name, is_init_check=True)
    if (name := section.experts_implementation) is not None and "/" not in name:
        with _refused(f"model.experts_implementation = {name!r}"):
            model.get_correct_experts_implementation(name)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ValueError(f"{setting}: {error}") from None
