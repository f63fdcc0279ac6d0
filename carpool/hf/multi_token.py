"""Layers that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

A model predicts token i + 1 at position i. Behind its last layer, layer k = 1, 2, ... predicts token i + 1 + k there:

    h_i          what the layer before has made, its norm included; for k = 1, the model itself
    e_i          the embedding of token i + k
    h'_i         projection([norm(e_i), norm(h_i)])  ->  a decoder layer as the model's last one  ->  norm
    logits       of the model's own output layer, for token i + 1 + k

    tokens       a b c d e          k = 1: at a, the embedding of b comes in, and c is predicted
    targets      b c d e .          of the model;  c d e . .  of layer 1;  d e . . .  of layer 2

The loss is that of the model, plus a weight times the mean over k of the cross-entropies of layers, each summed over
its targets and divided by the tokens that the model predicts, as in the paper. Embedding and output layer are the
model's, so their gradients are sums. Nothing is predicted across the end of a packed document.

A layer is a member of the model's own list of decoder layers, under the number that published checkpoints give it.
Transformers' forward runs the first `num_hidden_layers` of that list. So weights are read and written under the
published names, and experts are dispatched, compiled, recomputed and sharded as all others. The layers run inside the
output layer's call, where FSDP has its weight (`carpool.hf.loss_head`), and in training alone. Which hidden state goes
from layer to layer differs between implementations: as in Megatron-LM and Transformers, it is the normalised one.
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
# (hidden_BLH, target_BL) -> the sum of cross-entropies, by the model's output layer.
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MultiTokenLayers(ArchitectureChange):
    """Adds the layers. Setting: depth, their number."""

    in_files = True

    def describe(self) -> str:
        depth = self.settings["depth"]
        others = "s (mtp.depth); vLLM gives all but the first one other hidden states" if depth > 1 else " (mtp.depth)"
        return f"multi-token prediction: {depth} further layer{others}"

    def apply(self, model: PreTrainedModel) -> None:
        names, depth = family_of(model).multi_token, int(self.settings["depth"])
        if names is None:
            known = sorted(one for one in FAMILIES if FAMILIES[one].multi_token is not None)
            raise ValueError(
                f"mtp.depth = {depth}: Carpool does not know how checkpoints of {type(model).__name__} name layers "
                f"that predict further tokens; it knows that of {', '.join(known)}: leave mtp.depth out"
            )
        text: Any = model.config.get_text_config()
        decoder: Any = model.get_decoder()
        first, norm = text.num_hidden_layers, type(decoder.norm)
        for number in range(first, first + depth):
            with torch.device("meta"):
                # As the last layer is: configurations say of no layer behind it what it has.
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
        # What files repeat is the model's own.
        repeated = rf"\.layers\.\d+\.({re.escape(names.embedding)}|{re.escape(names.head)})\."
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), repeated}

    def absent(self, model: PreTrainedModel, stored: Collection[str]) -> list[str]:
        return [
            f"{name}." for name in multi_token_layers(model) if not any(one.startswith(f"{name}.") for one in stored)
        ]


def _add(layer: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    if parent and not hasattr(layer, parent):
        layer.add_module(parent, nn.Module())
    layer.get_submodule(parent).add_module(leaf, module)


def _project(
    names: MultiToken, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the layer's forward, which gets one tensor in the place of two. FSDP has gathered its weights."""
    embedding_BLH = layer.get_submodule(names.embedding_norm)(kwargs.pop("embedding_BLH"))
    hidden_BLH = layer.get_submodule(names.hidden_norm)(args[0])
    joined_BLH = layer.get_submodule(names.projection)(torch.cat([embedding_BLH, hidden_BLH], -1))
    return (joined_BLH, *args[1:]), kwargs


def _normalise(names: MultiToken, layer: nn.Module, args: Any, out_BLH: torch.Tensor) -> torch.Tensor:
    normalised: torch.Tensor = layer.get_submodule(names.norm)(out_BLH)
    return normalised


def multi_token_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that predict further tokens, by name, in order."""
    return {name: module for name, module in model.named_modules() if _MARK in vars(module)}


def untraced(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of these modules are in such layers. They do not run where routing is traced, so files of layouts may not
    have them."""
    layers = tuple(f"{name}." for name in multi_token_layers(model))
    return [name for name in names if name.startswith(layers)]


def repeated_weights(model: PreTrainedModel) -> dict[str, str]:
    """Names in files of weights that repeat another one, and that one's name in the model."""
    layers = multi_token_layers(model)
    names_of = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if layers and cast(nn.Module, head).weight is cast(nn.Module, embedding).weight:
        head = embedding  # of tied weights, which files have once, the first name
    found = {}
    for name, layer in layers.items():
        names: MultiToken = vars(layer)[_MARK]
        found[f"{name}.{names.embedding}.weight"] = f"{names_of[id(embedding)]}.weight"
        found[f"{name}.{names.head}.weight"] = f"{names_of[id(head)]}.weight"
    return found


def layer_keys(model: PreTrainedModel) -> dict[str, int]:
    """What a config.json says of the number of such layers, of a family that may have some."""
    names = family_of(model).multi_token
    return {} if names is None else {names.key: len(multi_token_layers(model))}


def stored_layers(config: PreTrainedConfig, stored: Collection[str]) -> int:
    """How many such layers a checkpoint has. `stored`: names of its weights."""
    text: Any = config.get_text_config()
    names = family_of(text).multi_token
    if names is None:
        return 0
    found = {
        int(match[1])
        for one in stored
        if (match := re.search(rf"\.layers\.(\d+)\.{re.escape(names.projection)}\.", one))
    }
    return sum(number >= text.num_hidden_layers for number in found)


def unknown_weights(config: PreTrainedConfig, stored: Collection[str]) -> list[str]:
    """Weights of such layers of a checkpoint whose family names them in a way that Carpool does not know."""
    text: Any = config.get_text_config()
    if family_of(text).multi_token is not None:
        return []
    behind = [(name, re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)) for name in stored]
    return [
        name
        for name, match in behind
        if re.search(r"(?:^|\.)mtp[._]", name) or (match is not None and int(match[1]) >= text.num_hidden_layers)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The loss of these layers, inside of a model's forward.

# Of this thread: two halves of a micro-batch are in the model at the same time (`carpool.ride.two_batch`).
_PREDICTED: ContextVar[Predicted | None] = ContextVar("predicted", default=None)


class FurtherTokens:
    """What a model with such layers predicts beyond the next token.

    Args:
        weight: of the mean of its losses.

    Attributes:
        depth: the number of layers;  routers: those in them whose logits a model returns.
    """

    def __init__(self, model: Any, weight: float) -> None:
        found = multi_token_layers(model)
        self.layers = list(found.values())
        self.routers = sum(name.startswith(tuple(f"{one}." for one in found)) for name in find_routers(model))
        text: Any = model.config.get_text_config()
        names = family_of(text).multi_token
        assert names is not None
        # Of a pipeline, the last stage alone has the layers.
        self.weight, self.depth = weight, int(getattr(text, names.key))
        self.embedding = cast(nn.Module, model.get_input_embeddings())
        last = cast(Any, model.get_decoder()).layers[text.num_hidden_layers - 1]
        last.register_forward_pre_hook(_note_settings, with_kwargs=True)

    def shifted(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of whole sequences, for each layer: the tokens whose embeddings come in, and those that are predicted, -100:
        none. Where a document has no such token, the embedding of the position's own token comes in. `batch`: input_ids
        and labels, (B, L); position_ids of each token in its document, where rows have several; where there is padding.
        """
        ids_BL, labels_BL, found = batch["input_ids"], batch["labels"], {}
        for k in range(1, self.depth + 1):
            found[f"further_ids_{k}"] = torch.where(_inside(batch, k), ids_BL.roll(-k, 1), ids_BL)
            target_BL = labels_BL.roll(-1 - k, 1)
            found[f"further_target_{k}"] = target_BL.masked_fill(~_inside(batch, k + 1), IGNORED)
        return found

    def makers(self, batch: dict[str, torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        """What makes the embeddings that come in, for another stage of a pipeline."""
        return [partial(self.embedding, batch[f"further_ids_{k}"]) for k in range(1, self.depth + 1)]

    def predict(self, batch: dict[str, torch.Tensor], embeddings: Sequence[torch.Tensor] | None = None) -> Predicted:
        """What a forward enters. `batch`: with what `shifted` made, or a rank's parts of it; `embeddings`: of those
        tokens, from another stage of a pipeline."""
        numbers = range(1, self.depth + 1)
        ids, targets = ([batch[f"further_{what}_{k}"] for k in numbers] for what in ("ids", "target"))
        return Predicted(self, ids, targets, embeddings)


class Predicted:
    """One forward of a model with such layers.

    Attributes:
        sums: (2 * depth,) float64, after it: of each layer the sum of cross-entropies, and of how many tokens.
        main: the model's own sum.
    """

    def __init__(
        self,
        of: FurtherTokens,
        ids: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        embeddings: Sequence[torch.Tensor] | None,
    ) -> None:
        self.of, self.ids, self.targets, self.embeddings = of, ids, targets, embeddings
        self.settings: dict[str, Any] | None = None
        self.sums = self.main = torch.zeros(())
        self._token: Token[Predicted | None] | None = None

    def __enter__(self) -> Predicted:
        self._token = _PREDICTED.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _PREDICTED.reset(self._token)

    def add_losses(self, loss: torch.Tensor, hidden_BLH: torch.Tensor, cross_entropy: CrossEntropy) -> torch.Tensor:
        """The model's loss, which is a sum over tokens, and the weighted losses of all layers. `hidden_BLH`: what the
        model gives its output layer."""
        assert self.settings is not None, "the model's last layer has not been called"
        losses, self.main = [], loss.detach()
        for k, (layer, ids_BL, target_BL) in enumerate(zip(self.of.layers, self.ids, self.targets, strict=True)):
            embedding_BLH = self.of.embedding(ids_BL) if self.embeddings is None else self.embeddings[k]
            hidden_BLH = layer(hidden_BLH, embedding_BLH=embedding_BLH, **self.settings)
            losses.append(cross_entropy(hidden_BLH, target_BL))
        numbers = [(target_BL != IGNORED).sum() for target_BL in self.targets]
        pairs = zip(losses, numbers, strict=True)
        self.sums = torch.stack([one.detach().double() for pair in pairs for one in pair])
        return loss + sum(losses) * (self.of.weight / len(losses))


def _inside(batch: dict[str, torch.Tensor], k: int) -> torch.Tensor:
    """(B, L): whether the token k places later is in the same document."""
    length = batch["input_ids"].shape[1]
    inside_BL = (torch.arange(length, device=batch["input_ids"].device) < length - k).expand_as(batch["input_ids"])
    if (position_BL := batch.get("position_ids")) is not None:
        inside_BL = inside_BL & (position_BL.roll(-k, 1) == position_BL + k)
    if (padding_BL := batch.get("padding")) is not None:
        inside_BL = inside_BL & ~padding_BL.roll(-k, 1)
    return inside_BL


def predicted_now() -> Predicted | None:
    """What the forward that runs in this thread predicts beyond the next token; None: nothing."""
    return _PREDICTED.get()


def _note_settings(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of the model's last layer: masks and positions are those of the layers behind it."""
    if (predicted := _PREDICTED.get()) is not None:
        predicted.settings = copy.copy(kwargs)
