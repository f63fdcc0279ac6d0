"""Checks before a layer computes: of constructor arguments, and of recordings that are replayed.

Arguments must have the types of the constructor's annotations, or the error names the argument and its type:

    check_types(MoE.__init__, {"layout": "contiguous", ...})
    ->  TypeError: layout='contiguous' must be carpool.layout.expert_layout.ExpertLayout or None

Without this check Python would fail later, in code that the caller does not know.

A recording is checked on all ranks together, before anything is sent: tokens are sent with K ids each, so ranks with
another K would misread them, and a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from carpool.routing import Routing


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that is not of a type that the function's annotations name.

    Args:
        given: arguments by name; those without an annotation are not checked."""
    for name, hint in get_type_hints(function).items():
        wanted = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
        if name in given and not any(_is(given[name], get_origin(one) or one) for one in wanted):
            named = " or ".join(map(_name, wanted))
            raise TypeError(f"{name}={given[name]!r} must be {named}")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError for a parameter dtype that cannot be trained."""
    known = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if dtype is not None and dtype not in known:
        raise ValueError(f"{dtype=} cannot be trained in: use one of {', '.join(map(str, known))}")


def _is(value: Any, wanted: Any) -> bool:
    if wanted is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _name(wanted: Any) -> str:
    if wanted is type(None):
        return "None"
    cls = get_origin(wanted) or wanted
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def check_replay(recording: Routing, num_tokens: int, num_experts: int, group: dist.ProcessGroup | None) -> None:
    """Check a recording on all ranks of the group. Collective; waits for the device.

    Raises:
        ValueError: on all ranks, if the recording of any does not fit its tokens, or they have different K."""
    error: ValueError | None = None
    try:
        recording.check(num_tokens, num_experts)
    except ValueError as refused:
        error = refused
    if group is not None:
        top_k = recording.expert_TK.shape[1] if recording.expert_TK.dim() == 2 else -1
        mine = torch.tensor([int(error is not None), top_k], device=recording.expert_TK.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        refuses, counts = torch.stack(gathered, 1).tolist()
        if error is None and any(refuses):
            error = ValueError(
                f"routing of rank {refuses.index(1)} of the expert-parallel group does not fit its tokens"
            )
        if error is None and len(different := sorted(set(counts))) > 1:
            error = ValueError(f"all ranks must replay as many choices per token, but they have K = {different}")
    if error is not None:
        raise error
