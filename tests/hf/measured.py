"""What the layers of a model save is measured once in a process, however many runs of the same model it takes part in.

A forward on fake tensors takes a third of a short run's time, in every rank, and depends on shapes and settings alone.
Ranks are forked after `measure_once`, and have it too.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from transformers import PreTrainedModel

from carpool.train.plan import estimate


def measure_once() -> None:
    """From now on, runs of this process measure each model once for each way to run it."""
    measure, known = estimate.measure_activations, dict[Any, Any]()

    def measured(model: PreTrainedModel, *how: Any) -> Any:
        tensors = chain(model.named_parameters(), model.named_buffers())
        key = (
            how,
            model.config.to_json_string(use_diff=False),
            model.config.get_text_config()._attn_implementation,
            tuple((name, type(module)) for name, module in model.named_modules()),
            tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in tensors),
        )
        if key not in known:
            known[key] = measure(model, *how)
        return known[key]

    estimate.measure_activations = measured  # type: ignore[assignment]
