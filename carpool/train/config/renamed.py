"""Settings of version 0.1 that have another name, or other values, now.

A run that is given an old name is refused with the new one. The configuration that a run of 0.1 has recorded
(`config.toml` in its directory) is translated, so that its checkpoints can be resumed, exported and evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpool.train.config.schema_base import toml_value

_SAVED = {"keep": "save"}
# SECTION.KEY of 0.1: (SECTION.KEY now, new values by old value where these changed, too).
RENAMED: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "parallelism.dense": ("parallelism.data_parallel", {"replicate": "zero1"}),
    "moe.expert_stages": ("moe.expert_kernels", {}),
    "moe.fp8_hold_weights": ("moe.fp8_cache_weights", {}),
    "moe.balance": ("moe.balance_scope", {}),
    "codec.hop": ("codec.inter_node", {}),
    "codec.merge_hashes": ("codec.merge_options.hashes", {}),
    "codec.merge_width": ("codec.merge_options.width", {}),
    "codec.merge_similarity": ("codec.merge_options.similarity", {}),
    "moe.move_sequences": ("sequence_moves.every", {}),
    "memory.rows": ("memory.expert_inputs", _SAVED),
    "memory.hidden": ("memory.expert_activations", _SAVED),
    "memory.dense": ("memory.layer_activations", _SAVED),
    "memory.sums": ("memory.moe_outputs", _SAVED),
    "memory.few_tokens": ("memory.cpu_expert_tokens", {}),
    "memory.experts_memory": ("memory.expert_device_memory", {}),
    "memory.experts_host_memory": ("memory.expert_host_memory", {}),
    "training.optimizer_moments": ("training.optimizer_state_dtype", {}),
    "training.optimizer_state": ("training.optimizer_offload", {"device": "none"}),
    "training.gradients": ("training.optimizer_in_backward", {"kept": False, "consumed": True}),
    "training.clip_by": ("training.grad_clipping", {"norm": "exact", "previous": "delayed"}),
    "training.loss_chunk": ("training.loss_chunk_size", {}),
    "training.freeze": ("training.freeze", {"dense": "non_expert"}),
}


# What recorded configurations hold of settings that are options now, where nobody set them.
_DEFAULTS = {
    "codec.merge_hashes": 2,
    "codec.merge_width": 16,
    "codec.merge_similarity": 0.9,
    "moe.move_sequences": "none",
}


def renamed(section: str, key: str, value: Any) -> str | None:
    """What to write instead of `section.key = value`, such as "memory.expert_inputs = 'save'"; None: it is no old name
    or value."""
    if f"{section}.{key}" not in RENAMED:
        return None
    name, values = RENAMED[f"{section}.{key}"]
    known = isinstance(value, str | bool) and value in values
    if name == f"{section}.{key}" and not known:
        return None
    return f"{name} = {toml_value(values[value] if known else value)}"


def value_now(name: str, value: Any) -> Any:
    """A value of the setting that is called `name` now, if version 0.1 had another word for it."""
    return next((values.get(value, value) for new, values in RENAMED.values() if new == name), value)


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of 0.1 with the names and values of now.

    Example: {"memory": {"rows": "keep"}} -> {"memory": {"expert_inputs": "save"}}"""
    found: dict[str, Any] = {}
    for section, table in settings.items():
        if not isinstance(table, Mapping):
            found[section] = table
            continue
        found.setdefault(section, {})
        for key, value in table.items():
            name, values = RENAMED.get(f"{section}.{key}", (f"{section}.{key}", {}))
            if f"{section}.{key}" in _DEFAULTS and value == _DEFAULTS[f"{section}.{key}"]:
                continue
            first, *tables, last = name.split(".")
            into = found.setdefault(first, {})
            for one in tables:
                into = into.setdefault(one, {})
            into[last] = values.get(value, value) if isinstance(value, str) else value
    return found
