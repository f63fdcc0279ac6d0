"""Recording which experts tokens choose: `carpool.record`.

    with carpool.record(model) as recorder:        # on all ranks
        for batch in batches:
            model(batch)
    recorder.trace().save("trace.npz")             # on all ranks: a `carpool.placement.trace.Trace`

`carpool place trace.npz --ranks N` then finds where experts should live. What is kept, and in which order, is told in
`carpool.layer.recorder`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from carpool.layer.core import LayerCore
from carpool.layer.recorder import Recorder
from carpool.metrics.counters import in_recompute

__all__ = ["Recording", "record"]


def record(
    module: nn.Module,
    capacity_tokens: int = 65536,
    *,
    every: int = 1,
    stretch: int = 512,
    weights: bool = False,
    layers: Sequence[str] | None = None,
) -> Recording:
    """Record which experts the tokens choose in every forward of `module`, until the `with` block ends.

    Args:
        module: a `carpool.MoE`, a module that holds several, or a transformers model whose layers are Carpool's. On all
            ranks.
        capacity_tokens: how many tokens, over all ranks, are kept: the newest.
        every: record each `every`-th forward of `module`.
        stretch: sequences are recorded in stretches of at most so many tokens. A trace needs two stretches at least
            to be solved on one half and judged on the other.
        weights: also record the routing weights.
        layers: names of the MoE layers to record, as `module.named_modules()` has them. None: all.

    Returns:
        A context manager; `trace()` gives what was recorded, inside the block or after it.

    What activation checkpointing computes again is not recorded again. Evaluations are recorded.

    Raises:
        ValueError: a module or a layer without experts of Carpool, layers of different sizes, or a size below 1.

    Example:
        >>> with carpool.record(moe) as recorder:
        ...     moe(x)                                        # (batch, tokens, hidden)
        >>> recorder.trace().save("trace.npz")                # for `carpool place trace.npz --ranks 8`
    """
    return Recording(module, capacity_tokens, every=every, stretch=stretch, weights=weights, layers=layers)


class _Inputs(threading.local):
    """Of a thread's forward: the shapes of its inputs, and whether a layer has been reached."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.begun = False


class Recording(Recorder):
    """What `record` returns: hooks on a module and its MoE layers."""

    def __init__(
        self,
        module: nn.Module,
        capacity_tokens: int,
        *,
        every: int,
        stretch: int,
        weights: bool,
        layers: Sequence[str] | None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module that holds MoE layers")
        found = {name or "moe": (one, core) for name, one in module.named_modules() if (core := _core(one)) is not None}
        if missing := sorted(set(layers or ()) - found.keys()):
            raise ValueError(f"the module has no MoE layer {missing[0]!r}; it has {', '.join(found) or 'none'}")
        names = [name for name in found if layers is None or name in layers]
        if not names:
            raise ValueError(
                f"{type(module).__name__} has no MoE layer of Carpool; carpool.hf.TraceRecorder records other layers "
                "of transformers' models"
            )
        sizes = {found[name][1].num_experts for name in names}
        if len(sizes) > 1:
            raise ValueError(f"one trace has layers of one size, but these have {sorted(sizes)} experts: name layers")
        super().__init__(
            names,
            sizes.pop(),
            next(module.parameters()).device,
            capacity_tokens,
            every=every,
            stretch=stretch,
            whole=True,
            weights=weights,
            name=type(module).__name__,
        )
        self._inputs = _Inputs()
        self._handles = [module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)]
        for number, name in enumerate(names):
            hook = _AfterLayer(self, number, found[name][1])
            self._handles.append(found[name][0].register_forward_hook(hook, with_kwargs=True))

    @torch._disable_dynamo
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the whole module begins; how its tokens are arranged, its inputs tell."""
        if not in_recompute():
            self._forward.stretches, self._inputs.begun = [], False
            self._inputs.shapes = [
                (one.shape[0], one.shape[1]) for one in _tensors((*args, *kwargs.values())) if one.dim() >= 2
            ]

    @torch._disable_dynamo
    @torch.no_grad()
    def _after_layer(self, number: int, core: LayerCore, inputs: Iterable[Any]) -> None:
        if core.routing is None or in_recompute():
            return
        expert_TK, weight_TK = core.routing.expert_TK, core.routing.weight_TK
        if not self._inputs.begun:
            self._inputs.begun = True
            self._begin(*self._arranged(expert_TK.shape[0], next(iter(_tensors(inputs)), None)))
        self._keep(number, expert_TK.long(), weight_TK)

    def _arranged(self, tokens: int, x: torch.Tensor | None) -> tuple[int, int]:
        """Sequences, and tokens of each: as the layer's input has them, or else an input of the whole module."""
        if x is not None and x.dim() > 2 and math.prod(x.shape[:-1]) == tokens:
            return math.prod(x.shape[:-2]), x.shape[-2]
        return next((shape for shape in self._inputs.shapes if math.prod(shape) == tokens), (1, tokens))


class _AfterLayer:
    """The hook of one MoE layer."""

    def __init__(self, recording: Recording, number: int, core: LayerCore) -> None:
        self.recording, self.number, self.core = recording, number, core

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.recording._after_layer(self.number, self.core, (*args, *kwargs.values()))


def _core(module: nn.Module) -> LayerCore | None:
    """The core of a `carpool.MoE`, or of an experts module of transformers that `carpool.hf` has taken over."""
    found = (getattr(module, name, None) for name in ("core", "_carpool_rides"))
    return next((core for core in found if isinstance(core, LayerCore)), None)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
