"""From the `[model]` and `[parallelism]` sections to what transformers takes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from carpool.hf.axes.context import choose_way
from carpool.hf.axes.sequence_parallel import why_not_sequence_parallel
from carpool.hf.building.narrow import narrow_experts
from carpool.hf.compute.attention import fused_attention
from carpool.hf.compute.documents import DOCUMENTS, why_no_bounds
from carpool.hf.config.sizes import TOP_K, check_sizes, first_key
from carpool.hf.config.source import make_config, read_config
from carpool.hf.seam.layers import experts_modules
from carpool.parallel.context import Cut
from carpool.parallel.degrees import Degrees
from carpool.planner.decisions.chosen import Kind
from carpool.plugins.nearest import nearest
from carpool.train.config.published import FROM, read_keys
from carpool.train.config.schema import Config, ModelSection
from carpool.train.data.formats import are_packed
from carpool.train.data.tokenizer import Tokenizer


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


def context_cut(config: Config, degrees: Degrees, model: PreTrainedModel, rank: int = 0) -> Cut | None:
    """Which part of every sequence a rank has; None: whole ones.

    Args:
        model: may be on the meta device.

    Raises:
        ValueError: a model, sequences or heads that cannot be divided so."""
    if degrees.cp == 1:
        return None
    way = choose_way(
        model,
        degrees.cp,
        config.data.sequence_length,
        config.parallelism.cp_attention,
        heads_divided=degrees.tp,
        packed=are_packed(config.data),
        implementation=config.model.attn_implementation,
    )
    return Cut(degrees.cp, degrees.coordinate(rank, "cp"), way)


def attention_of(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """What computes attention, as Transformers names it; None: its default."""
    if config.model.attn_implementation is not None:
        return config.model.attn_implementation
    packed, training = are_packed(config.data), config.training
    # Not shown to be right, or bitwise repeatable, with these.
    unsure = degrees.cp > 1 or training.full_determinism
    if packed and not unsure:
        half = config.model.dtype == "bfloat16" or training.computes_in_bf16(cuda)
        # Without a GPU the host reads where documents end, which no compiled layer can.
        compiled = training.torch_compile and not cuda
        return None if compiled or why_no_bounds(model, cuda, half) else DOCUMENTS
    return fused_attention(model) if cuda and not packed and not unsure else None


def planned_attention(config: Config, degrees: Degrees, model: PreTrainedModel, cuda: bool) -> str | None:
    """The same as the planner reads it (`carpool.planner.model.shape`), to which what is not "eager" is fused."""
    return attention_of(config, degrees, model, cuda) or ("eager" if fused_attention(model) else None)


def check_attention(model: ModelSection) -> None:
    """Raise ValueError for an attention that transformers does not know. Those with a slash are its kernels."""
    name, known = model.attn_implementation, ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if name is not None and name not in known and "/" not in name:
        close = nearest(name, known)
        hint = f" (did you mean {close}?)" if close else ""
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


def distributed_config(degrees: Degrees, bf16: bool) -> DistributedConfig:
    """The mesh for transformers: FSDP2 x TP for dense parameters, FSDP2 x EP for experts."""
    return DistributedConfig(
        tp_size=degrees.tp,
        # Ranks that share sequences shard dense parameters, too.
        fsdp_size=degrees.fsdp * degrees.cp,
        dp_replicate_size=degrees.dp_replicate,
        # For transformers a slice of an expert is an expert.
        ep_size=degrees.expert_ranks,
        ep_implementation="carpool",
        fsdp_mixed_precision=bf16,
    )


SEQUENCE_KIND: Kind[bool] = Kind("sequence_parallel", lambda on: {"on": on}, lambda record: bool(record["on"]))


def divides_tokens(config: Config, degrees: Degrees, blueprint: PreTrainedModel) -> tuple[bool, str]:
    """Whether tensor-parallel ranks divide their tokens among themselves (`carpool.hf.axes.sequence_parallel`), and
    why.

    Raises:
        ValueError: that was asked for, and cannot be."""
    asked, reason = config.parallelism.sequence_parallel, None
    if degrees.tp == 1:
        reason = "there is one tensor-parallel rank"
    elif config.training.torch_compile:
        reason = "training.torch_compile compiles whole layers"
    elif config.training.gradients == "consumed":
        reason = "training.gradients = 'consumed' uses gradients before they are summed over ranks"
    else:
        reason = why_not_sequence_parallel(blueprint, degrees.ep)
    if asked == "on" and reason is not None:
        raise ValueError(f"parallelism.sequence_parallel = 'on' cannot be: {reason}; use 'auto' or 'off'")
    if asked == "off" or reason is not None:
        return False, reason or "asked for"
    return True, "fewer bytes between ranks, and norms and routers are computed once"


@contextmanager
def loading_shown(main: bool) -> Iterator[None]:
    """Inside, rank 0 of a terminal shows Transformers' progress bar of loading weights."""
    if not (main and sys.stderr.isatty()):
        yield
        return
    enable_progress_bar()
    try:
        yield
    finally:
        disable_progress_bar()


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
