"""Recording which experts the tokens of a transformers model choose, while it trains or answers.

    recorder = TraceRecorder(model, 8192)          # on all ranks
    ...                                            # training steps
    trace = recorder.trace(steps=1000)             # on all ranks: a `carpool.placement.trace.Trace` of what is kept

What is sampled: of each forward of the model, one stretch of neighbouring tokens of one sequence, on every rank; the
next forward takes the next sequence of its batch, and, once all had their turn, the next stretch of each.

    batch of 2 sequences of 1024 tokens, stretch 512      forward 0   sequence 0, tokens 0 .. 511
                                                          forward 1   sequence 1, tokens 0 .. 511
                                                          forward 2   sequence 0, tokens 512 .. 1023
                                                          forward 3   sequence 1, tokens 512 .. 1023

All layers record the same tokens. Samples lie in a ring on the device, so memory is bounded and the newest are kept:
2 K bytes a token and layer, 4 K with weights. Where a stretch begins is known on the host, so a recorded forward costs
a hook before the model and, per layer, the sort and the copy of one stretch's choices, and no synchronisation.

Choices are taken where they enter the experts module, so models without Carpool's layers are recorded just as well, and
a limit on the routing (carpool/hf/limit.py) is in what is recorded. What activation checkpointing computes again is
not recorded again, and an evaluation only if that was asked for.

Of ranks that hold the same tokens (tensor parallelism) the first one's sample counts. Gathered sequences are dealt in
turn: sequence i of the trace comes from data rank i % W, as `Trace.source_T` says.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import carpool
from carpool.hf.build import experts_modules
from carpool.observe.recompute import in_recompute
from carpool.placement.trace import Trace

_NO_EXPERT = -1


class Mark(NamedTuple):
    """A place in what a recorder has seen."""

    forwards: int
    recorded: int
    lengths: tuple[int, ...]


class TraceRecorder:
    """Samples the routing of a model's MoE layers; see the module's docstring. All ranks construct and call it alike.

    Args:
        model: a mixture of experts of transformers, sharded or not.
        capacity_tokens: how many tokens, over all ranks, are kept: the newest. Rounded up to whole stretches.
        every: record each `every`-th forward.
        stretch: at most so many neighbouring tokens of one sequence.
        weights: also record the routing weights.
        evaluation: also record forwards of the model in `eval()`.
        layers: names of the experts modules to record, such as "model.layers.0.mlp.experts". None: all.

    Raises:
        ValueError: a model or a layer without experts, or a size below 1.
    """

    def __init__(
        self,
        model: Any,
        capacity_tokens: int = 8192,
        *,
        every: int = 1,
        stretch: int = 512,
        weights: bool = False,
        evaluation: bool = False,
        layers: Sequence[str] | None = None,
    ) -> None:
        if min(capacity_tokens, every, stretch) < 1:
            raise ValueError(
                f"capacity_tokens={capacity_tokens}, every={every} and stretch={stretch} must all be at least 1"
            )
        found = experts_modules(model)
        if missing := sorted(set(layers or ()) - found.keys()):
            raise ValueError(f"the model has no experts module {missing[0]!r}; it has {', '.join(found) or 'none'}")
        self.layers = tuple(name for name in found if layers is None or name in layers)
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no experts whose choices could be recorded")
        self.model, self.every, self.stretch = model, every, min(stretch, capacity_tokens)
        self.weights, self.evaluation = weights, evaluation
        manager = getattr(model, "_mesh_manager", None)
        self._copy, copies = (0, 1) if manager is None else _place(manager.get_mesh("tp"))
        self._experts = [model.get_submodule(name) for name in self.layers]
        self.num_experts = max(_num_experts(module, model) for module in self._experts)
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        places = -(-capacity_tokens // (self.stretch * max(1, self._ranks // copies)))
        self.capacity = places * self.stretch
        # Whose tokens each place of the ring holds: how many of them. All places are of the same size.
        self._lengths = [0] * places
        self._forwards = self._recorded = 0
        self._place: tuple[int, int, int, int] | None = None
        self._expert_LCK: torch.Tensor | None = None
        self._weight_LCK: torch.Tensor | None = None
        self._token_C: torch.Tensor | None = None
        self._misfit: str | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            *(
                module.register_forward_pre_hook(_Layer(self, number), with_kwargs=True)
                for number, module in enumerate(self._experts)
            ),
        ]

    def trace(self, **about: Any) -> Trace:
        """What was sampled on all ranks, the same trace on each. Collective; waits for the device.

        Args:
            about: further entries of the trace's `meta`, such as steps, data or seed.

        Raises:
            ValueError: nothing was recorded, or layers did not see the same tokens.
        """
        if self._misfit:
            raise ValueError(self._misfit)
        if self._expert_LCK is None or self._token_C is None:
            raise ValueError(
                "no forward was recorded yet"
                + ("" if self.evaluation else "; those of an evaluation are only with evaluation=True")
            )
        lengths = torch.tensor([*self._lengths, self._copy], device=self._token_C.device)
        lengths_R = [row.tolist() for row in self._gather(lengths)]
        sources = [rank for rank, row in enumerate(lengths_R) if row[-1] == 0]
        pieces = [(rank, place * self.stretch, lengths_R[rank][place]) for place in self._order() for rank in sources]

        def joined(own: torch.Tensor) -> Any:
            """All ranks' pieces, in the order of the trace, along the axis of tokens."""
            axis = 0 if own.dim() == 1 else 1
            parts = self._gather(own)
            return torch.cat([parts[rank].narrow(axis, first, n) for rank, first, n in pieces], dim=axis).numpy()

        expert_LTK, token_T = joined(self._expert_LCK), joined(self._token_C)
        weight_LTK = None if self._weight_LCK is None else joined(self._weight_LCK)
        sequence_T = np.repeat(np.arange(len(pieces)), [n for _, _, n in pieces])
        # Padding, and tokens that some layer gave fewer than K experts, have no place in a trace.
        keep_T = (token_T >= 0) & ((expert_LTK >= 0) & (expert_LTK < self.num_experts)).all(axis=(0, 2))
        if not keep_T.any():
            raise ValueError("no recorded token has K experts in every layer, so there is nothing to place")
        return Trace(
            expert_LTK[:, keep_T].astype(np.uint8 if self.num_experts <= 256 else np.uint16),
            sequence_T[keep_T].astype(np.int32),
            self.layers,
            self._meta(about),
            None if weight_LTK is None else weight_LTK[:, keep_T],
            token_T[keep_T].astype(np.int32),
        )

    def reset(self) -> None:
        """Forget what was recorded: the experts have moved on, or the text is another."""
        self._lengths = [0] * len(self._lengths)
        self._recorded, self._misfit = 0, None

    def mark(self) -> Mark:
        """Where the recorder is, for `rewind`."""
        return Mark(self._forwards, self._recorded, tuple(self._lengths))

    def rewind(self, mark: Mark) -> None:
        """Forget the forwards since `mark`: they are void, and those that follow stand for them, as many."""
        self._forwards, self._recorded, self._lengths = mark.forwards, mark.recorded, list(mark.lengths)

    def close(self) -> None:
        """Take the hooks off the model and give the memory back."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._place = [], None
        self._expert_LCK = self._weight_LCK = self._token_C = None

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- hooks ------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._place = None
        if not (module.training or self.evaluation) or in_recompute():
            return
        self._forwards += 1
        if (self._forwards - 1) % self.every:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        shaped = ids if ids is not None else kwargs.get("inputs_embeds")
        if shaped is None:
            return
        sequences, tokens = shaped.shape[:2]
        if not sequences * tokens:
            return
        turn, sequence = divmod(self._recorded, sequences)
        start = self.stretch * (turn % max(1, tokens // self.stretch))
        length = min(self.stretch, tokens - start)
        place = self._recorded % len(self._lengths)
        self._lengths[place] = length
        self._recorded += 1
        first = place * self.stretch
        self._place = (first, length, sequence * tokens + start, sequences * tokens)
        if self._token_C is None:
            self._token_C = torch.zeros(self.capacity, dtype=torch.int32, device=shaped.device)
        here_C = self._token_C[first : first + length]
        here_C.copy_(ids[sequence, start : start + length]) if ids is not None else here_C.zero_()
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == (sequences, tokens):
            here_C.masked_fill_(mask[sequence, start : start + length] == 0, -1)

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_layer(self, number: int, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        if self._place is None or in_recompute():
            return
        first, length, start, tokens = self._place
        if index_TK.shape[0] != tokens:
            self._misfit = (
                f"{self.layers[number]} got {index_TK.shape[0]} tokens while the model's input has {tokens}: its "
                "choices belong to other tokens; name the layers to record with layers=[...]"
            )
            return
        if self._expert_LCK is None:
            shape = (len(self.layers), self.capacity, index_TK.shape[1])
            self._expert_LCK = torch.full(shape, _NO_EXPERT, dtype=torch.int16, device=index_TK.device)
            self._weight_LCK = self._expert_LCK.half() if self.weights else None
        # Routers are free to return their choices in any order; a trace has the best first.
        weight_TK, order_TK = weight_TK[start : start + length].float().sort(dim=1, descending=True, stable=True)
        chosen_TK = index_TK[start : start + length].gather(1, order_TK)
        chosen_TK = torch.where((chosen_TK >= 0) & (chosen_TK < self.num_experts), chosen_TK, _NO_EXPERT)
        self._expert_LCK[number, first : first + length].copy_(chosen_TK)
        if self._weight_LCK is not None:
            self._weight_LCK[number, first : first + length].copy_(weight_TK)

    # -- the ranks' samples together ----------------------------------------------------------------------------

    def _order(self) -> list[int]:
        """Places of the ring that hold something, oldest first."""
        places = len(self._lengths)
        return [number % places for number in range(max(0, self._recorded - places), self._recorded)]

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
            "model": type(self.model).__name__,
            "stretch": self.stretch,
            "every": self.every,
            "ranks": self._ranks,
            "carpool_version": carpool.__version__,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **about,
        }


class _Layer:
    """The hook of one experts module: finds the choices among its arguments."""

    def __init__(self, recorder: TraceRecorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        _, index_TK, weight_TK = (*args, *(kwargs[name] for name in names[len(args) :]))
        self.recorder._before_layer(self.number, index_TK, weight_TK)


def _place(mesh: Any) -> tuple[int, int]:
    return mesh.get_local_rank(), mesh.size()


def _num_experts(module: Any, model: Any) -> int:
    """Experts of the whole layer: the module counts those of this rank alone."""
    own = getattr(module, "_carpool_rides", None)
    if own is not None:
        return int(own.num_experts)
    config = getattr(model.config, "distributed_config", None)
    return int(module.num_experts) * int(getattr(config, "ep_size", None) or 1)
