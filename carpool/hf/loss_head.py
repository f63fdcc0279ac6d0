"""The loss of a transformers model without all of its logits: its output layer computes it.

A model ends with `logits = self.lm_head(hidden_states)`, and hands the logits out. While a loss is asked for, the
output layer gives back the loss in their place (`carpool.kernels.cross_entropy`):

    loss = HeadLoss(model)
    loss(input_ids, target)         model(input_ids) -> lm_head(hidden_BLH), which knows the targets -> a scalar

So the loss is computed inside the layer's call, where FSDP has gathered its weight, tied or not, and afterwards
reduces its gradient. Nothing else of the model changes, and without labels the layer makes logits as ever.

`why_whole` says when this cannot be: then logits are made as the model makes them, all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.families import Logits, family_of_class
from carpool.hf.multi_token import FUTURE_LOSSES
from carpool.hf.quantised_base import QuantisedLinear
from carpool.hf.tensor_parallel import SequenceHead, of_whole_vocabulary, sequence_shard
from carpool.kernels.cross_entropy import IGNORED, linear_cross_entropy

# Of hidden states (T, H) and all else that `linear_cross_entropy` takes.
Computed = Callable[..., torch.Tensor]


class HeadLoss:
    """The cross-entropy of a causal language model, summed over the tokens that it predicts.

    Args:
        tokens_at_once: tokens whose logits are in memory at once. None: as `carpool.kernels.cross_entropy` finds right;
            0: all, as the model makes them.

    Attributes:
        why_whole: why logits are made all at once; None: they are not.
        copies: ranks that compute the same sum, those of a tensor-parallel group; 1 where each has its own tokens'.
    """

    def __init__(self, model: nn.Module, tokens_at_once: int | None = None) -> None:
        self.model, self.tokens_at_once = model, tokens_at_once
        self.why_whole = "that was asked for" if tokens_at_once == 0 else why_whole(model)
        self.change = logit_change(model)
        tp_size = getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1
        self.shard = sequence_shard(model) if self.why_whole is None else None
        self.copies = 1 if self.shard is not None else tp_size
        if self.why_whole is None:
            head = output_layer(model)
            if not isinstance(head.forward, _Head):
                # An attribute of the instance, which nn.Module's call finds before the class's.
                head.forward = _Head(head)

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        target_BL: torch.Tensor,
        compute: Computed = linear_cross_entropy,
        **settings: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Run the model.

        Args:
            input_ids: (B, L). None: `settings`, for the model's forward, have `inputs_embeds`. It makes no cache of
                keys and values unless they have `use_cache`.
            target_BL: the token that each position predicts, -100: none (`next_tokens`).
            compute: instead of the cross-entropy, where the output layer computes (`why_whole`).

        Returns:
            The sum, a scalar of float32 or float64, or what `compute` returns; and what the model returned, whose
            `logits` mean nothing.

        Raises:
            RuntimeError: the model changes its logits after its output layer, which `carpool.families` does not say."""
        # A cache of keys and values is of no use to a loss, and a compiled layer would be another one for each layer.
        settings = {"use_cache": False, **settings}
        if self.why_whole is not None:
            out = self.model(input_ids=input_ids, **settings)
            with torch.profiler.record_function("carpool::loss"):
                logits = out.logits if out.logits.dtype == torch.float64 else out.logits.float()
                target_T = target_BL.flatten()
                return F.cross_entropy(logits.flatten(0, 1), target_T, ignore_index=IGNORED, reduction="sum"), out
        if self.shard is not None:
            target_BL = self.shard.own(target_BL.flatten()).unsqueeze(0)
        asked = _Asked(target_BL, self.tokens_at_once, self.change or LogitChange(), compute)
        token = _ASKED.set(asked)
        try:
            out = self.model(input_ids=input_ids, **settings)
        finally:
            _ASKED.reset(token)
        # Where the change is known, the model does to the loss what it does to logits, and nobody looks at it.
        if asked.loss is None or (self.change is None and out.logits is not asked.loss):
            raise RuntimeError(
                f"{type(self.model).__name__} changes its logits after its output layer, so that layer cannot compute "
                "the loss: set training.loss_chunk_size=0"
            )
        return asked.loss, out


def next_tokens(labels_BL: torch.Tensor) -> torch.Tensor:
    """What each position of whole sequences predicts: the label after its own, -100 at the end."""
    return F.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)


class LogitChange(NamedTuple):
    """What a model does to its logits: as `linear_cross_entropy` takes it."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass
class _Asked:
    """A loss that is asked for: (B, L) targets, tokens of a chunk, what the model does to logits, what computes it; and
    the loss."""

    target_BL: torch.Tensor
    tokens_at_once: int | None
    change: LogitChange
    compute: Computed
    loss: torch.Tensor | None = None


# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_ASKED: ContextVar[_Asked | None] = ContextVar("asked", default=None)


class _Head:
    """Stands for the forward of an output layer."""

    def __init__(self, head: Any) -> None:
        self.head, self.own = head, head.forward

    @torch._disable_dynamo
    def __call__(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        asked = _ASKED.get()
        if asked is None:
            logits: torch.Tensor = self.own(hidden_BLH)
            return logits
        if hidden_BLH.shape[:-1] != asked.target_BL.shape or asked.loss is not None:
            raise RuntimeError(
                f"the output layer was called more than once, or with rows of shape {tuple(hidden_BLH.shape)} for "
                f"labels of shape {tuple(asked.target_BL.shape)}, so it cannot compute the loss: set "
                "training.loss_chunk_size=0"
            )
        weight_VH, bias_V = self.head.weight, self.head.bias
        layer = self.head.as_layer() if isinstance(self.head, QuantisedLinear) else None
        if isinstance(self.own, SequenceHead):
            weight_VH, bias_V = of_whole_vocabulary(weight_VH), of_whole_vocabulary(bias_V)
        scale, softcap = asked.change

        def compute(x_BLH: torch.Tensor, target_BL: torch.Tensor) -> torch.Tensor:
            x_TH, target_T = x_BLH.flatten(0, -2), target_BL.flatten()
            with torch.profiler.record_function("carpool::loss"):
                return asked.compute(x_TH, weight_VH, bias_V, target_T, asked.tokens_at_once, scale, softcap, layer)

        asked.loss = compute(hidden_BLH, asked.target_BL)
        if (future := FUTURE_LOSSES.get()) is not None:
            asked.loss = future.add_losses(asked.loss, hidden_BLH, compute)
        return asked.loss


def output_layer(model: nn.Module) -> Any:
    """The output layer of a model of transformers; None if it has none."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _forward_of(model: nn.Module) -> type:
    """The class whose forward a model runs: FSDP and users derive classes from it."""
    return next(cls for cls in type(model).__mro__ if "forward" in vars(cls))


def known_change(model: nn.Module) -> Logits | None:
    """What a model does to its logits after its output layer, if it is known to do something."""
    return family_of_class(_forward_of(model)).logits


def logit_change(model: nn.Module) -> LogitChange | None:
    """The same in numbers; None also where only the model's own code does it."""
    known = known_change(model)
    if known is None or known.change == "other" or (config := getattr(model, "config", None)) is None:
        return None
    number = getattr(config.get_text_config(), known.key)
    if known.change == "cap":
        return LogitChange(softcap=number)
    return LogitChange(scale=1 / number if known.change == "divide" else number)


def why_whole(model: nn.Module) -> str | None:
    """Why the output layer of a model cannot compute the loss; None: it can."""
    name, known = _forward_of(model).__name__, known_change(model)
    if known is not None and known.change == "other":
        return f"{name} changes its logits after its output layer"
    head = output_layer(model)
    plain = isinstance(head, nn.Linear) and next(c for c in type(head).__mro__ if "forward" in vars(c))
    if plain not in (nn.Linear, QuantisedLinear):
        return f"the output layer of {name} is no plain linear layer, but {type(head).__name__}"
    own = vars(head).get("forward")
    rows = isinstance(own.own if isinstance(own, _Head) else own, SequenceHead)
    if own is not None and not isinstance(own, _Head | SequenceHead):
        return f"the forward of the output layer of {name} has been replaced"
    weight = head.weight
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    over_vocabulary = mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    if over_vocabulary and not rows:
        return "tensor parallelism shards the output layer over the vocabulary"
    return "the output layer is whole on each tensor-parallel rank" if rows and not over_vocabulary else None
