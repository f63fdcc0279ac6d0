"""Hooks of gradients that do not keep a model alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def on_gradient(parameter: torch.Tensor, method: Callable[..., None], *arguments: Any) -> None:
    """From now on, call `method(*arguments, parameter)` whenever a backward has made the parameter's gradient.

    Python's garbage collector does not see what such a hook holds. One that held what owns the parameter would keep
    both for good, with all that the owner has. So the method's object is held weakly.

    Args:
        method: of an object that lives as long as the parameter is trained.
        arguments: nothing that holds a parameter.
    """
    held = weakref.WeakMethod(method)

    def came(parameter: torch.Tensor) -> None:
        if (call := held()) is not None:
            call(*arguments, parameter)

    parameter.register_post_accumulate_grad_hook(came)
