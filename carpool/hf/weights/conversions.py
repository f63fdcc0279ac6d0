"""Checkpoints that transformers (5.23) cannot shard while it reads them.

A checkpoint may hold a model's weights in another form: one tensor per expert, or q, k and v in one. transformers
converts them with `WeightConverter`s. On several ranks it first takes this rank's shard of each tensor of the
checkpoint, along dimension 0, and then converts the shard. Stacking experts commutes with that; what cuts, joins or
permutes dimension 0 itself does not: three shards of q, k and v, joined, are not a shard of the joined tensor. The
shapes may even fit, and then the weights are silently wrong.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, WeightConverter


def unshardable(model: PreTrainedModel) -> list[str]:
    """The parameters that would come out wrong if a checkpoint of this model were loaded with FSDP or EP."""
    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    broken = [c for c in converters if not all(_keeps_dimension_0(op) for op in c.operations)]
    patterns = [p.lstrip("^").rstrip("$").replace("*", r"\d+") for c in broken for p in c._original_target_patterns]
    names = (name for name, _ in model.named_parameters())
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def merges_experts(model: PreTrainedModel) -> bool:
    """Whether a checkpoint of this model has experts one by one, which transformers stacks; it cannot stack none."""
    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    return any(isinstance(op, MergeModulelist) for c in converters for op in c.operations)


def _keeps_dimension_0(operation: Any) -> bool:
    if isinstance(operation, Concatenate | Interleave):
        return operation.dim >= 1
    return isinstance(operation, MergeModulelist)
