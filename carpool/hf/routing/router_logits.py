"""The router logits of a forward, for the balance loss, without asking the model for them.

    collector = RouterLogits(model)
    with collector.collect() as logits:         a list, filled in the order of the layers
        model(input_ids=...)
    balance_loss(logits, top_k)

Asked with `output_router_logits=True`, models return the same tensors, but they also compute a balance loss of this
rank's tokens that nobody wants, and their hooks look at a context variable, which cuts the graphs of compiled layers.
Here a hook on each router appends its logits to the list, and a layer that is compiled returns them beside its output
(`with_logits`), so that its graph stays whole. What activation checkpointing computes again is outside of `collect`,
and appends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from carpool.hf.seam.layers import list_number

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_COLLECTED: ContextVar[list[torch.Tensor] | None] = ContextVar("router_logits", default=None)


class RouterLogits:
    """Collects the router logits of a transformers model.

    Args:
        none: it may have no routers: a stage of a pipeline.

    Raises:
        ValueError: transformers does not say where this model's router logits are."""

    def __init__(self, model: nn.Module, none: bool = False) -> None:
        found = find_routers(model)
        if not found and not none:
            raise ValueError(f"transformers does not say which modules of {type(model).__name__} make router logits")
        self.model, self.count = model, len(found)
        for name, (router, index) in found.items():
            if not any(isinstance(hook, _Record) for hook in router._forward_hooks.values()):
                number = list_number(name)
                layer = model.get_submodule(".".join(name.split(".")[: number + 1])) if number is not None else model
                router.register_forward_hook(_Record(index, traced_logits(layer)))

    @contextmanager
    def collect(self, expected: int | None = None) -> Iterator[list[torch.Tensor]]:
        """Inside, one forward of the model fills the list with a (T, E) tensor for each router; `expected`: of a part
        of the model, with so many."""
        found: list[torch.Tensor] = []
        token = _COLLECTED.set(found)
        try:
            yield found
        finally:
            _COLLECTED.reset(token)
        number = self.count if expected is None else expected
        if len(found) != number:
            raise RuntimeError(
                f"{type(self.model).__name__} has {number} routers, but a forward made {len(found)} router logits"
            )


class TracedLogits:
    """Where the routers of a layer that is being compiled put their logits. None: not inside of `with_logits`."""

    logits: list[torch.Tensor] | None = None


def traced_logits(layer: nn.Module) -> TracedLogits:
    """The one of a layer."""
    found = vars(layer).get("_carpool_traced_logits")
    if found is None:
        found = TracedLogits()
        # Past nn.Module, to whom it is nothing.
        object.__setattr__(layer, "_carpool_traced_logits", found)
    return found


def with_logits(
    own: Callable[..., Any], layer: nn.Module, traced: TracedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """What `own(layer, ...)` returns, and the logits that its routers made while it was traced. For `torch.compile`: of
    all that it is given only the kind counts, so layers share their graphs."""
    logits: list[torch.Tensor] = []
    traced.logits = logits
    try:
        out = own(layer, *args, **kwargs)
    finally:
        # A checkpoint ends a layer that it computes again by an exception. What stayed here would keep the step's
        # graph of autograd, and no later step could be captured.
        traced.logits = None
    return out, logits


@torch._disable_dynamo
def add_collected(logits: list[torch.Tensor]) -> None:
    """Add to the list of `RouterLogits.collect`, if there is one."""
    found = _COLLECTED.get()
    if found is not None:
        found.extend(logits)


class _Record:
    """The hook on a router."""

    def __init__(self, index: int, traced: TracedLogits) -> None:
        self.index, self.traced = index, traced

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        logits = out[self.index] if isinstance(out, tuple) else out
        if torch.compiler.is_compiling() and self.traced.logits is not None:
            self.traced.logits.append(logits)
        else:
            add_collected([logits])


def find_routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """The modules that make the router logits which a model of transformers returns, by name, in the order of its
    layers, each with the place of the logits in its output."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for prefix, part in model.named_modules():
        # A model within a model speaks for itself.
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(part, PreTrainedModel) or not isinstance(recorder, OutputRecorder):
            continue
        for name, module in part.named_modules(prefix=prefix):
            within = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
            if recorder.target_class is not None and isinstance(module, recorder.target_class) and within:
                found[name] = module, recorder.index
    return found
