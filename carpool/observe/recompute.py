"""Whether a forward is the second one of activation checkpointing."""

from __future__ import annotations

import torch


def in_recompute() -> bool:
    """Whether this forward is the second one of activation checkpointing.

    Both kinds of checkpointing (reentrant or not) recompute inside the backward pass, where autograd has a graph
    task under way. Counting tokens there again is a known bug of load statistics.
    """
    return torch._C._current_graph_task_id() != -1
