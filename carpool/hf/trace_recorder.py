"""Records which experts the tokens of a transformers model choose, while it trains or answers.

    recorder = TraceRecorder(model, 8192)          # on all ranks
    ...                                            # training steps
    trace = recorder.trace(steps=1000)             # on all ranks: a `carpool.placement.trace.Trace`

Of each forward it samples one stretch of neighbouring tokens of one sequence, on every rank, the same in all layers;
the next forward takes the next sequence, and once all had their turn, the next stretch of each. Samples are in the ring
of `carpool.layer.recorder`, which bounds memory and never waits for the device.

Choices are taken where they enter the experts module: models without Carpool's layers are recorded too, and limits on
the routing are included. What activation checkpointing computes again is not recorded again. Of tensor-parallel ranks
with the same tokens the first one's sample counts; with sequence parallelism each samples its own. `carpool.record`
records all tokens of a forward, and no token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from carpool.hf.multi_token import multi_token_layers
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.tensor_parallel import sequence_shard
from carpool.layer.recorder import Mark, Recorder
from carpool.metrics.counters import in_recompute
from carpool.planner.candidate import STRETCH

__all__ = ["Mark", "TraceRecorder"]


class TraceRecorder(Recorder):
    """Samples the routing of a model's MoE layers. All ranks construct and call it alike.

    Args:
        capacity_tokens: how many tokens, over all ranks, are kept: the newest. Rounded up to whole stretches.
        every: record each `every`-th forward.
        stretch: at most so many neighbouring tokens of one sequence.
        weights: also record the routing weights.
        evaluation: also record forwards of the model in `eval()`.
        layers: names of the experts modules to record, such as "model.layers.0.mlp.experts". None: all that are called.

    Raises:
        ValueError: a model or a layer without experts, or a size below 1.
    """

    def __init__(
        self,
        model: Any,
        capacity_tokens: int = 8192,
        *,
        every: int = 1,
        stretch: int = STRETCH,
        weights: bool = False,
        evaluation: bool = False,
        layers: Sequence[str] | None = None,
    ) -> None:
        found = experts_modules(model)
        if missing := sorted(set(layers or ()) - found.keys()):
            raise ValueError(f"the model has no experts module {missing[0]!r}; it has {', '.join(found) or 'none'}")
        # Which an evaluation does not call.
        further = tuple(f"{name}." for name in multi_token_layers(model)) if evaluation else ()
        wanted = layers or [name for name in found if not name.startswith(further)]
        names = tuple(name for name in found if name in wanted)
        if not names:
            raise ValueError(f"{type(model).__name__} has no experts whose choices could be recorded")
        experts = [model.get_submodule(name) for name in names]
        manager, self._shard = getattr(model, "_mesh_manager", None), sequence_shard(model)
        replica, num_replicas = 0, 1
        if manager is not None and self._shard is None:
            mesh = manager.get_mesh("tp")
            replica, num_replicas = mesh.get_local_rank(), mesh.size()
        super().__init__(
            names,
            max(_num_experts(module, model) for module in experts),
            next(model.parameters()).device,
            capacity_tokens,
            every=every,
            stretch=stretch,
            whole=False,
            weights=weights,
            name=type(model).__name__,
            replica=replica,
            num_replicas=num_replicas,
        )
        self.model, self.evaluation = model, evaluation
        if not evaluation:
            self._nothing += "; those of an evaluation are only with evaluation=True"
        self._handles = [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            *(
                module.register_forward_pre_hook(_Layer(self, number), with_kwargs=True)
                for number, module in enumerate(experts)
            ),
        ]

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward.stretches = []
        if self.paused or not (module.training or self.evaluation) or in_recompute():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        shaped = ids if ids is not None else kwargs.get("inputs_embeds")
        if shaped is None:
            return
        mask = kwargs.get("attention_mask")
        padding = mask.reshape(-1) == 0 if isinstance(mask, torch.Tensor) and mask.shape == shaped.shape[:2] else None
        flat = None if ids is None else ids.reshape(-1)
        if self._shard is not None:
            flat, padding = (None if one is None else self._shard.own(one) for one in (flat, padding))
        self._begin(*self._arranged(*shaped.shape[:2]))
        for start, length, first in self._forward.stretches:
            here_C = self._token_ring(shaped.device)[first : first + length]
            here_C.copy_(flat[start : start + length]) if flat is not None else here_C.zero_()
            if padding is not None:
                here_C.masked_fill_(padding[start : start + length], -1)

    def _arranged(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Sequences, and tokens of each, that this rank's layers see of a batch: all, or its share where
        tensor-parallel ranks divide tokens. A share that is no whole sequences counts as one."""
        if self._shard is None:
            return sequences, tokens
        own = self._shard.own(torch.empty(sequences * tokens, device="meta")).shape[0]
        return (1, own) if own % tokens else (own // tokens, tokens)

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_layer(self, number: int, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        if not in_recompute():
            self._record(number, index_TK, weight_TK)


class _Layer:
    """The hook of one experts module: finds the choices among its arguments."""

    def __init__(self, recorder: TraceRecorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        _, index_TK, weight_TK = (*args, *(kwargs[name] for name in names[len(args) :]))
        self.recorder._before_layer(self.number, index_TK, weight_TK)


def _num_experts(module: Any, model: Any) -> int:
    """Experts of the whole layer: the module counts those of this rank alone."""
    own = getattr(module, "_carpool_rides", None)
    if own is not None:
        return int(own.num_experts)
    config = getattr(model.config, "distributed_config", None)
    return int(module.num_experts) * int(getattr(config, "ep_size", None) or 1)
