"""Recorders of routings: a ring buffer of the experts that tokens choose, and the trace made from it.

A recording consists of *stretches*: neighbouring tokens of one sequence, the same tokens in all layers. They are stored
in a ring buffer on the device, so memory is bounded and the oldest are overwritten: 2 K bytes per token and layer, 4 K
with weights. The host knows the begin of each stretch, so recording never waits for the device; per layer and stretch
it costs one sort and one copy of the choices. In a trace each stretch is a sequence of its own.

`trace` gathers the stretches of all ranks and interleaves them: the first one of each rank, then the second one of each
rank, and so on. If all ranks have tokens in every forward, sequence i comes from rank i % W, as in `Trace.source_T`.

The public interface is `carpool.record`.

    with carpool.record(model) as recorder:        # on all ranks
        for batch in batches:
            model(batch)
    recorder.trace().save("trace.npz")             # on all ranks: a `carpool.placement.trace.Trace`

`carpool place trace.npz --ranks N` then solves for a layout of experts.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

import carpool
from carpool.layer.core import LayerCore
from carpool.metrics.counters import in_recompute
from carpool.placement.trace import Trace

__all__ = ["Mark", "Recorder"]

_NO_EXPERT = -1


class Mark(NamedTuple):
    """A position in a recording."""

    forwards: int
    recorded: int
    lengths: tuple[int, ...]


class _Stretch(NamedTuple):
    """Tokens to record: `length` tokens from `start` on, counted over the batch, are stored from `first` on in the
    ring."""

    start: int
    length: int
    first: int


class _Forward(threading.local):
    """State of the current forward, per thread: two halves of a micro-batch run in threads of their own
    (`carpool.ride.two_batch`).

    Attributes:
        tokens: of the batch.
    """

    def __init__(self) -> None:
        self.stretches: list[_Stretch] = []
        self.tokens = 0


class Recorder:
    """The ring buffer of stretches, and the trace made from it. A subclass calls `_begin` before the layers of each
    forward, `_record` for each layer, and sets `_handles`.

    Args:
        layers: names of the recorded layers.
        capacity_tokens: size of the ring buffer in tokens, over all ranks. Rounded up to whole stretches.
        every: record each `every`-th forward.
        stretch: tokens of a stretch, at most.
        whole: record all stretches of a forward. False: a different one each time.
        weights: also record the routing weights.
        name: of the model, for the trace's `meta`.
        replica, num_replicas: the number of this rank among ranks with the same tokens, and their number. Only the
            first one's stretches are in the trace.

    Attributes:
        paused: nothing is recorded (`pause`).

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        layers: Sequence[str],
        num_experts: int,
        device: torch.device,
        capacity_tokens: int,
        *,
        every: int,
        stretch: int,
        whole: bool,
        weights: bool,
        name: str,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        if min(capacity_tokens, every, stretch) < 1:
            raise ValueError(
                f"capacity_tokens={capacity_tokens}, every={every} and stretch={stretch} must all be at least 1"
            )
        self.layers, self.num_experts, self.device = tuple(layers), num_experts, device
        self.every, self.stretch, self.whole = every, min(stretch, capacity_tokens), whole
        self.weights, self.name, self._replica = weights, name, replica
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        places = -(-capacity_tokens // (self.stretch * max(1, self._ranks // num_replicas)))
        self.capacity = places * self.stretch
        # Tokens in each place of the ring buffer. All places have the same size.
        self._lengths = [0] * places
        self._forwards = self._recorded = 0
        self.paused = False
        self._forward = _Forward()
        self._expert_LCK: torch.Tensor | None = None
        self._weight_LCK: torch.Tensor | None = None
        self._token_C: torch.Tensor | None = None
        self._misfit: str | None = None
        self._nothing = "no forward was recorded yet"
        self._handles: list[RemovableHandle] = []

    def trace(self, **about: Any) -> Trace:
        """The recording of all ranks, the same trace on each. Collective; waits for the device.

        Args:
            about: further entries of the trace's `meta`, such as steps, data or seed.

        Raises:
            ValueError: nothing was recorded, or layers did not see the same tokens.
        """
        top_k, misfits = 0 if self._expert_LCK is None else self._expert_LCK.shape[2], int(self._misfit is not None)
        facts = [*self._lengths, misfits, self._replica, self._recorded, top_k, int(self._token_C is not None)]
        facts_R = [row.tolist() for row in self._gather(torch.tensor(facts, device=self.device))]
        # Errors are raised after the gathering, which is collective.
        if bad := [rank for rank, row in enumerate(facts_R) if row[-5]]:
            raise ValueError(self._misfit or f"rank {bad[0]} has no trace, so there is none: its message says why")
        top_k, ids = (max(row[at] for row in facts_R) for at in (-2, -1))
        if not top_k:
            raise ValueError(self._nothing)
        sources = [rank for rank, row in enumerate(facts_R) if row[-4] == 0]
        pieces = [
            (rank, place * self.stretch, facts_R[rank][place])
            for place in self._order(max(row[-3] for row in facts_R))
            for rank in sources
        ]

        def joined(own: torch.Tensor) -> Any:
            """The stretches of all ranks, in the order of the trace, concatenated along tokens."""
            axis = 0 if own.dim() == 1 else 1
            parts = self._gather(own)
            return torch.cat([parts[rank].narrow(axis, first, n) for rank, first, n in pieces], dim=axis).numpy()

        self._allocate_ring(top_k, self.device)
        if ids:
            self._token_ring(self.device)
        assert self._expert_LCK is not None
        expert_LTK = joined(self._expert_LCK)
        token_T = None if self._token_C is None else joined(self._token_C)
        weight_LTK = None if self._weight_LCK is None else joined(self._weight_LCK)
        sequence_T = np.repeat(np.arange(len(pieces)), [n for _, _, n in pieces])
        # A trace has no padding, and no tokens with fewer than K experts in some layer.
        keep_T = ((expert_LTK >= 0) & (expert_LTK < self.num_experts)).all(axis=(0, 2))
        if token_T is not None:
            keep_T &= token_T >= 0
        if not keep_T.any():
            raise ValueError("no recorded token has K experts in every layer, so there is nothing to place")
        return Trace(
            expert_LTK[:, keep_T].astype(np.uint8 if self.num_experts <= 256 else np.uint16),
            sequence_T[keep_T].astype(np.int32),
            self.layers,
            self._meta(about),
            None if weight_LTK is None else weight_LTK[:, keep_T],
            None if token_T is None else token_T[keep_T].astype(np.int32),
        )

    def reset(self) -> None:
        """Discard the recording, for instance because the data has changed."""
        self._lengths = [0] * len(self._lengths)
        self._recorded, self._misfit = 0, None

    def pause(self) -> None:
        """Record no forwards until `resume`. They may be CUDA graphs, for which the host chooses no stretches."""
        self.paused = True

    def resume(self, recorded: int) -> None:
        """Record on, as if `recorded` stretches had been recorded since the last `reset`; they are not in the trace."""
        self.paused, self._recorded, self._lengths = False, recorded, [0] * len(self._lengths)

    def mark(self) -> Mark:
        """The current position, for `rewind`."""
        return Mark(self._forwards, self._recorded, tuple(self._lengths))

    def rewind(self, mark: Mark) -> None:
        """Discard the forwards since `mark`, which are about to be repeated."""
        self._forwards, self._recorded, self._lengths = mark.forwards, mark.recorded, list(mark.lengths)

    def stop(self) -> None:
        """Record no further forwards. `trace` is still possible."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._forward = [], _Forward()

    def close(self) -> None:
        """`stop`, and free the memory."""
        self.stop()
        self._expert_LCK = self._weight_LCK = self._token_C = None
        self.reset()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- for subclasses -------------------------------------------------------------------------------------------

    def _begin(self, sequences: int, tokens: int) -> None:
        """Choose the stretches to record of a forward of `sequences` sequences of `tokens` tokens. A rank without
        tokens uses a place too, so that places correspond to the same forwards on all ranks."""
        self._forward.stretches, self._forward.tokens = [], sequences * tokens
        if self.paused:
            return
        self._forwards += 1
        if (self._forwards - 1) % self.every:
            return
        if not sequences * tokens:
            wanted = [(0, 0)]
        elif self.whole:
            starts = range(0, tokens, self.stretch)
            wanted = [(number * tokens + start, tokens - start) for number in range(sequences) for start in starts]
            wanted = wanted[-len(self._lengths) :]  # the others would be overwritten
        else:
            turn, number = divmod(self._recorded, sequences)
            start = self.stretch * (turn % max(1, tokens // self.stretch))
            wanted = [(number * tokens + start, tokens - start)]
        for first, left in wanted:
            place, length = self._recorded % len(self._lengths), min(self.stretch, left)
            self._lengths[place] = length
            self._recorded += 1
            if length:
                self._forward.stretches.append(_Stretch(first, length, place * self.stretch))

    def _record(self, number: int, expert_TK: torch.Tensor, weight_TK: torch.Tensor | None) -> None:
        """Record the choices of layer `number`: logical ids, anything outside 0..E-1 for none; without weights, best
        first."""
        if not self._forward.stretches:
            return
        if expert_TK.shape[0] != (tokens := self._forward.tokens):
            self._misfit = (
                f"{self.layers[number]} got {expert_TK.shape[0]} tokens while the model's input has {tokens}: "
                "its choices belong to other tokens; name the layers to record with layers=[...]"
            )
            return
        self._allocate_ring(expert_TK.shape[1], expert_TK.device)
        assert self._expert_LCK is not None
        for start, length, first in self._forward.stretches:
            chosen_TK = expert_TK[start : start + length]
            if weight_TK is not None:
                # Routers return their choices in any order; a trace has the best first.
                sorted_TK, order_TK = (
                    weight_TK[start : start + length].float().sort(dim=1, descending=True, stable=True)
                )
                chosen_TK = chosen_TK.gather(1, order_TK)
                if self._weight_LCK is not None:
                    self._weight_LCK[number, first : first + length].copy_(sorted_TK)
            chosen_TK = torch.where((chosen_TK >= 0) & (chosen_TK < self.num_experts), chosen_TK, _NO_EXPERT)
            self._expert_LCK[number, first : first + length].copy_(chosen_TK)

    def _allocate_ring(self, top_k: int, device: torch.device) -> None:
        """Allocate the ring buffer, once K is known."""
        if self._expert_LCK is None:
            shape = (len(self.layers), self.capacity, top_k)
            self._expert_LCK = torch.full(shape, _NO_EXPERT, dtype=torch.int16, device=device)
            self._weight_LCK = self._expert_LCK.half() if self.weights else None

    def _token_ring(self, device: torch.device) -> torch.Tensor:
        """(capacity,) ids of the recorded tokens, -1 for padding, for subclasses that know them."""
        if self._token_C is None:
            self._token_C = torch.zeros(self.capacity, dtype=torch.int32, device=device)
        return self._token_C

    # -- gathering over ranks --------------------------------------------------------------------------------------

    def _order(self, recorded: int) -> list[int]:
        """The filled places of the ring buffer, oldest first."""
        places = len(self._lengths)
        return [number % places for number in range(max(0, recorded - places), recorded)]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, on the CPU."""
        if self._ranks == 1:
            return [own.cpu()]
        flat = own.contiguous().view(torch.uint8)  # gloo has no 16-bit integers
        parts = [torch.empty_like(flat) for _ in range(self._ranks)]
        dist.all_gather(parts, flat)
        return [part.view(own.dtype).cpu() for part in parts]

    def _meta(self, about: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "model": self.name,
            "stretch": self.stretch,
            "every": self.every,
            "ranks": self._ranks,
            "carpool_version": carpool.__version__,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **about,
        }


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
        module: a `carpool.MoE`, a module that contains several, or a transformers model whose layers are Carpool's. On
            all ranks.
        capacity_tokens: tokens to record, over all ranks. Older ones are overwritten.
        every: record each `every`-th forward of `module`.
        stretch: sequences are recorded in stretches of at most so many tokens. A trace needs at least two stretches,
            because it is solved on one half and evaluated on the other.
        weights: also record the routing weights.
        layers: names of the MoE layers to record, as `module.named_modules()` has them. None: all.

    Returns:
        A context manager; `trace()` gives the recording, inside the block or after it.

    Recomputation by activation checkpointing is not recorded again. Evaluations are recorded.

    Raises:
        ValueError: a module or a layer without experts of Carpool, layers of different sizes, or a size below 1.

    Example:
        >>> with carpool.record(moe) as recorder:
        ...     moe(x)                                        # (batch, tokens, hidden)
        >>> recorder.trace().save("trace.npz")                # for `carpool place trace.npz --ranks 8`
    """
    return Recording(module, capacity_tokens, every=every, stretch=stretch, weights=weights, layers=layers)


class _Inputs(threading.local):
    """State of a thread's forward: the shapes of its inputs, and whether a layer has run."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.begun = False


class Recording(Recorder):
    """The recorder that `record` returns: hooks on a module and its MoE layers."""

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
        """Called before a forward of the whole module, whose inputs define sequences and tokens."""
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
        self._record(number, expert_TK.long(), weight_TK)

    def _arranged(self, tokens: int, x: torch.Tensor | None) -> tuple[int, int]:
        """(sequences, tokens of each), from the layer's input, or else from an input of the whole module."""
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
    """The core of a `carpool.MoE`, or of an experts module of transformers that `carpool.hf` has replaced."""
    found = (getattr(module, name, None) for name in ("core", "_carpool_rides"))
    return next((core for core in found if isinstance(core, LayerCore)), None)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
