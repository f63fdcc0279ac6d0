"""Multi-token prediction (MTP) layers (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A model predicts token i + 1 at position i. After its last layer, MTP layer k = 1, 2, ... predicts token i + 1 + k:

    h_i          the normalised output of the previous MTP layer; for k = 1, the model's last hidden state
    e_i          the embedding of token i + k
    h'_i         projection([norm(e_i), norm(h_i)])  ->  a decoder layer like the model's last one  ->  norm
    logits       the model's output layer applied to h'_i, for token i + 1 + k

    tokens       a b c d e          k = 1: position a reads the embedding of b, and predicts c
    targets      b c d e .          of the model;  c d e . .  of MTP layer 1;  d e . . .  of MTP layer 2

The loss is the model's, plus a weight times the mean over k of the MTP layers' cross-entropies. As in the paper, each
is summed over its targets and divided by the number of tokens that the model predicts. The MTP layers share the model's
embedding and output layer, whose gradients are sums. No layer predicts across the end of a packed document.

An MTP layer is a member of the model's list of decoder layers, at the index that published checkpoints give it.
Transformers' forward runs the first `num_hidden_layers` of that list. So weights are read and written under the
published names, and experts are dispatched, compiled, recomputed and sharded like all others. The layers run inside the
output layer's call, where FSDP has gathered its weight (`carpool.hf.loss_head`), and in training alone. As in
Megatron-LM and Transformers, the next MTP layer reads the normalised hidden state; other implementations differ.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from carpool.families import FAMILIES, MultiToken, family_of
from carpool.hf.architecture_changes import ArchitectureChange
from carpool.hf.routing.router_balance import find_routers
from carpool.kernels.cross_entropy import IGNORED

_MARK = "_carpool_multi_token"
# (hidden_BLH, target_BL) -> the sum of cross-entropies, computed by the model's output layer.
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MultiTokenLayers(ArchitectureChange):
    """Adds MTP layers to a model. The setting `depth` is their number."""

    in_files = True

    def describe(self) -> str:
        depth = self.settings["depth"]
        note = "s (mtp.depth); vLLM gives all but the first one other hidden states" if depth > 1 else " (mtp.depth)"
        return f"multi-token prediction: {depth} MTP layer{note}"

    def apply(self, model: PreTrainedModel) -> None:
        names, depth = family_of(model).multi_token, int(self.settings["depth"])
        if names is None:
            known = sorted(family for family in FAMILIES if FAMILIES[family].multi_token is not None)
            raise ValueError(
                f"mtp.depth = {depth}: Carpool does not know how checkpoints of {type(model).__name__} name MTP "
                f"layers, only those of {', '.join(known)}: leave mtp.depth out"
            )
        text: Any = model.config.get_text_config()
        decoder: Any = model.get_decoder()
        first, norm = text.num_hidden_layers, type(decoder.norm)
        for number in range(first, first + depth):
            with torch.device("meta"):
                # A copy of the last layer, because configurations do not describe the layers after it.
                layer = type(decoder.layers[first - 1])(text, first - 1)
                _add(layer, names.embedding_norm, norm(text.hidden_size, eps=text.rms_norm_eps))
                _add(layer, names.hidden_norm, norm(text.hidden_size, eps=text.rms_norm_eps))
                _add(layer, names.projection, nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False))
                _add(layer, names.norm, norm(text.hidden_size, eps=text.rms_norm_eps))
            for module in layer.modules():
                if getattr(module, "layer_idx", None) == first - 1:
                    module.layer_idx = number
            layer.register_forward_pre_hook(partial(_project, names), with_kwargs=True)
            layer.register_forward_hook(partial(_normalise, names))
            vars(layer)[_MARK] = names
            decoder.layers.append(layer.to(model.dtype).train(model.training))
        setattr(text, names.key, depth)
        # Files repeat the model's embedding and output layer for each MTP layer.
        repeated = rf"\.layers\.\d+\.({re.escape(names.embedding)}|{re.escape(names.head)})\."
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), repeated}

    def absent(self, model: PreTrainedModel, stored: Collection[str]) -> list[str]:
        return [
            f"{name}." for name in multi_token_layers(model) if not any(key.startswith(f"{name}.") for key in stored)
        ]


def _add(layer: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    if parent and not hasattr(layer, parent):
        layer.add_module(parent, nn.Module())
    layer.get_submodule(parent).add_module(leaf, module)


def _project(
    names: MultiToken, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an MTP layer: projects embedding and hidden state to its input. FSDP has gathered weights."""
    embedding_BLH = layer.get_submodule(names.embedding_norm)(kwargs.pop("embedding_BLH"))
    hidden_BLH = layer.get_submodule(names.hidden_norm)(args[0])
    joined_BLH = layer.get_submodule(names.projection)(torch.cat([embedding_BLH, hidden_BLH], -1))
    return (joined_BLH, *args[1:]), kwargs


def _normalise(names: MultiToken, layer: nn.Module, args: Any, out_BLH: torch.Tensor) -> torch.Tensor:
    normalised: torch.Tensor = layer.get_submodule(names.norm)(out_BLH)
    return normalised


def multi_token_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The MTP layers of a model, by name, in order."""
    return {name: module for name, module in model.named_modules() if _MARK in vars(module)}


def untraced(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of these modules are in MTP layers. Routing traces run without them, so layout files may lack them."""
    layers = tuple(f"{name}." for name in multi_token_layers(model))
    return [name for name in names if name.startswith(layers)]


def repeated_weights(model: PreTrainedModel) -> dict[str, str]:
    """Names in weight files that repeat another weight, with the name of that weight in the model."""
    layers = multi_token_layers(model)
    names_of = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if layers and cast(nn.Module, head).weight is cast(nn.Module, embedding).weight:
        head = embedding  # files store tied weights once, under the first name
    repeated = {}
    for name, layer in layers.items():
        names: MultiToken = vars(layer)[_MARK]
        repeated[f"{name}.{names.embedding}.weight"] = f"{names_of[id(embedding)]}.weight"
        repeated[f"{name}.{names.head}.weight"] = f"{names_of[id(head)]}.weight"
    return repeated


def layer_keys(model: PreTrainedModel) -> dict[str, int]:
    """The key of config.json with the number of MTP layers; empty for a family without them."""
    names = family_of(model).multi_token
    return {} if names is None else {names.key: len(multi_token_layers(model))}


def stored_layers(config: PreTrainedConfig, stored: Collection[str]) -> int:
    """How many MTP layers a checkpoint has. `stored`: the names of its weights."""
    text: Any = config.get_text_config()
    names = family_of(text).multi_token
    if names is None:
        return 0
    matches = (re.search(rf"\.layers\.(\d+)\.{re.escape(names.projection)}\.", name) for name in stored)
    indices = {int(match[1]) for match in matches if match}
    return sum(index >= text.num_hidden_layers for index in indices)


def unknown_weights(config: PreTrainedConfig, stored: Collection[str]) -> list[str]:
    """Names of a checkpoint's MTP weights, for a family whose names of MTP layers Carpool does not know."""
    text: Any = config.get_text_config()
    if family_of(text).multi_token is not None:
        return []
    matches = [(name, re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)) for name in stored]
    return [
        name
        for name, match in matches
        if re.search(r"(?:^|\.)mtp[._]", name) or (match is not None and int(match[1]) >= text.num_hidden_layers)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The loss of MTP layers, inside a model's forward.

# Of the forward that runs in this thread; None: it has none. Two halves of a micro-batch run in the model at a time
# (`carpool.ride.two_batch`).
FUTURE_LOSSES: ContextVar[FutureLosses | None] = ContextVar("future_losses", default=None)


class MultiTokenPredictor:
    """The targets and the loss of a model's MTP layers.

    Args:
        weight: the weight of the mean of the MTP layers' losses.

    Attributes:
        depth: the number of MTP layers;  routers: the number of their routers whose logits the model returns.
    """

    def __init__(self, model: Any, weight: float) -> None:
        layers = multi_token_layers(model)
        self.layers, prefixes = list(layers.values()), tuple(f"{name}." for name in layers)
        self.routers = sum(name.startswith(prefixes) for name in find_routers(model))
        text: Any = model.config.get_text_config()
        names = family_of(text).multi_token
        assert names is not None
        # Only the last stage of a pipeline has the layers.
        self.weight, self.depth = weight, int(getattr(text, names.key))
        self.embedding = cast(nn.Module, model.get_input_embeddings())
        last = cast(Any, model.get_decoder()).layers[text.num_hidden_layers - 1]
        last.register_forward_pre_hook(_save_settings, with_kwargs=True)

    def shifted(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns for each MTP layer the ids whose embeddings it reads and its targets, -100 for none, each (B, L).

        Where a document has no token i + k, position i reads the embedding of token i. `batch` holds whole sequences:
        input_ids and labels (B, L), position_ids within documents if rows are packed, and padding if there is some.
        """
        ids_BL, labels_BL, tensors = batch["input_ids"], batch["labels"], {}
        for k in range(1, self.depth + 1):
            tensors[f"future_ids_{k}"] = torch.where(_inside(batch, k), ids_BL.roll(-k, 1), ids_BL)
            target_BL = labels_BL.roll(-1 - k, 1)
            tensors[f"future_target_{k}"] = target_BL.masked_fill(~_inside(batch, k + 1), IGNORED)
        return tensors

    def embed(self, batch: dict[str, torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        """Returns functions that compute the embeddings of the MTP layers, which a pipeline's first stage sends."""
        return [partial(self.embedding, batch[f"future_ids_{k}"]) for k in range(1, self.depth + 1)]

    def losses(self, batch: dict[str, torch.Tensor], embeddings: Sequence[torch.Tensor] | None = None) -> FutureLosses:
        """Returns the context in which a forward adds the MTP losses. `batch` holds the tensors of `shifted`, or a
        rank's part of them. `embeddings`: the embeddings that a pipeline's first stage has sent."""
        numbers = range(1, self.depth + 1)
        ids, targets = ([batch[f"future_{kind}_{k}"] for k in numbers] for kind in ("ids", "target"))
        return FutureLosses(self, ids, targets, embeddings)


class FutureLosses:
    """The MTP losses of one forward, which runs inside this context.

    Attributes:
        sums: (2 * depth,) float64, after the forward: each layer's sum of cross-entropies and its number of targets.
        main: the model's own sum of cross-entropies.
    """

    def __init__(
        self,
        predictor: MultiTokenPredictor,
        ids: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        embeddings: Sequence[torch.Tensor] | None,
    ) -> None:
        self.predictor, self.ids, self.targets, self.embeddings = predictor, ids, targets, embeddings
        self.settings: dict[str, Any] | None = None
        self.sums = self.main = torch.zeros(())
        self._token: Token[FutureLosses | None] | None = None

    def __enter__(self) -> FutureLosses:
        self._token = FUTURE_LOSSES.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        FUTURE_LOSSES.reset(self._token)

    def add_losses(self, loss: torch.Tensor, hidden_BLH: torch.Tensor, cross_entropy: CrossEntropy) -> torch.Tensor:
        """Returns the model's loss, a sum over tokens, plus the weighted losses of all MTP layers. `hidden_BLH` is the
        input of the output layer."""
        assert self.settings is not None, "the model's last layer did not run"
        losses, self.main = [], loss.detach()
        for k, (layer, ids_BL, target_BL) in enumerate(zip(self.predictor.layers, self.ids, self.targets, strict=True)):
            embedding_BLH = self.predictor.embedding(ids_BL) if self.embeddings is None else self.embeddings[k]
            hidden_BLH = layer(hidden_BLH, embedding_BLH=embedding_BLH, **self.settings)
            losses.append(cross_entropy(hidden_BLH, target_BL))
        counts = [(target_BL != IGNORED).sum() for target_BL in self.targets]
        pairs = zip(losses, counts, strict=True)
        self.sums = torch.stack([value.detach().double() for pair in pairs for value in pair])
        return loss + sum(losses) * (self.predictor.weight / len(losses))


def _inside(batch: dict[str, torch.Tensor], k: int) -> torch.Tensor:
    """(B, L): whether the token k positions later is in the same document."""
    length = batch["input_ids"].shape[1]
    inside_BL = (torch.arange(length, device=batch["input_ids"].device) < length - k).expand_as(batch["input_ids"])
    if (position_BL := batch.get("position_ids")) is not None:
        inside_BL = inside_BL & (position_BL.roll(-k, 1) == position_BL + k)
    if (padding_BL := batch.get("padding")) is not None:
        inside_BL = inside_BL & ~padding_BL.roll(-k, 1)
    return inside_BL


def _save_settings(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the model's last layer: the MTP layers use its masks and positions."""
    if (future := FUTURE_LOSSES.get()) is not None:
        future.settings = copy.copy(kwargs)
