"""Sizes in a model's configuration: what cannot be meant, and the sizes of its heads.

What cannot be meant is refused before anything is built, with the key and the value. Transformers builds such models,
or fails with a division by zero, a negative dimension or a shape that does not fit, depending on the model and often
only in the first forward.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from carpool.families import family_of
from carpool.hf.config.keys import suggestion

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
