"""Arguments of a constructor are what its annotations say, or the error names the argument and what it must be.

    check_types(MoE.__init__, {"layout": "contiguous", ...})
    ->  TypeError: layout='contiguous' must be carpool.layout.expert_layout.ExpertLayout or None

Python itself would find out later, inside of something that the caller has never seen.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, get_args, get_origin, get_type_hints

import torch


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that is not of a type that the function's annotations name.

    Args:
        given: arguments by name; what has no annotation is not looked at."""
    for name, hint in get_type_hints(function).items():
        wanted = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
        if name in given and not any(_is(given[name], get_origin(one) or one) for one in wanted):
            named = " or ".join(map(_name, wanted))
            raise TypeError(f"{name}={given[name]!r} must be {named}")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError for parameters in which nothing can be trained."""
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
