"""Forwards of which it is known that no sequence is packed with another: transformers need not look.

Without an attention mask, a model's forward looks at its position ids for the seams of packed sequences
(`transformers.masking_utils`), and what it finds decides what is computed. So the host waits for the device at the
beginning of each forward, also where the model has just made these position ids itself, 0, 1, 2, ... in each row.

    with unpacked():
        model(input_ids=...)        no position ids: rows are single sequences
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers import masking_utils

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.schedule.two_batch`).
_UNPACKED: ContextVar[bool] = ContextVar("unpacked", default=False)
_look = masking_utils.find_packed_sequence_indices


@contextmanager
def unpacked() -> Iterator[None]:
    """Inside, models take each row for one sequence."""
    masking_utils.find_packed_sequence_indices = _find
    token = _UNPACKED.set(True)
    try:
        yield
    finally:
        _UNPACKED.reset(token)


def _find(position_ids: torch.Tensor) -> torch.Tensor | None:
    """In the place of transformers' own."""
    if not torch.compiler.is_compiling() and _UNPACKED.get():
        return None
    found: torch.Tensor | None = _look(position_ids)
    return found
