"""Padding takes no part in MoE layers: its tokens choose no expert.

    padding_T               .   .   .   x           with WithoutExperts(padding_T):
    the router's choices    30  12  01  23              model(input_ids=...)
    what rides              30  12  01  --

What has no choice does not travel, is computed by no expert, and counts in no load. Other layers compute padding still;
it ends rows, where causal attention keeps it from the tokens before it.

Models hand no mask to their experts, so each layer looks here. What activation checkpointing computes again, maybe in
another thread and after the forward of another micro-batch, must find what it found before: see `found_again`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_PADDING: ContextVar[torch.Tensor | None] = ContextVar("padding", default=None)


class WithoutExperts(AbstractContextManager[None]):
    """Inside, these tokens of this thread's forward choose no expert, as inside of `inner`. None: all choose."""

    def __init__(self, padding_T: torch.Tensor | None, inner: AbstractContextManager[None] | None = None) -> None:
        self._padding_T, self._inner, self._before = padding_T, inner or nullcontext(), padding_T

    def __enter__(self) -> None:
        self._before = _PADDING.get()
        _PADDING.set(self._padding_T)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _PADDING.set(self._before)


def found_again(inner: AbstractContextManager[None]) -> WithoutExperts:
    """`inner`, in which what is in its forward now is computed again; maybe several times."""
    return WithoutExperts(_PADDING.get(), inner)


def choices_of_tokens(expert_TK: torch.Tensor, part: int = 0, parts: int = 1) -> torch.Tensor:
    """(T, K) choices of experts with -1 in place of those of padding. Of tokens in equal parts, these are one."""
    if torch.compiler.is_compiling():
        # The graph asks each time that it runs.
        return _asked(expert_TK, part, parts)
    padding_T = _PADDING.get()
    if padding_T is None:
        return expert_TK
    each = -(-len(padding_T) // parts)
    return expert_TK.masked_fill(padding_T[part * each : (part + 1) * each].unsqueeze(1), -1)


@torch.library.custom_op("carpool::choices_of_tokens", mutates_args=())
def _asked(expert_TK: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    # What an operator returns must be none of its arguments.
    found = choices_of_tokens(expert_TK, part, parts)
    return found.clone() if found is expert_TK else found


@_asked.register_fake
def _(expert_TK: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return torch.empty_like(expert_TK)
