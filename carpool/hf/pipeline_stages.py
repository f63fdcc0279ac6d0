"""A causal language model of transformers as stages of a pipeline.

    parts = cut_model(blueprint, 4)             which layers each stage has, by what they compute for a token
    keep_parts(model, [parts[0], parts[3]])     still on the device "meta": the layers of other ranks go
    ... sharded, and filled with weights, as every model is
    stages = Stages(model, {0: parts[0], 3: parts[3]})
    hidden_BLH = stages.hidden(0, input_ids=ids)
    with stages.only(3): model(inputs_embeds=hidden_BLH)        the last stage, head included

A rank has one model with the layers of its stages, under the names and numbers of the whole one, so checkpoints,
exports and random weights are as without stages. A module that hands on its input stands for a layer of another rank. A
stage runs the whole model's forward without the layers of other stages; a later stage's embeddings are the hidden
states of the one before. That is right for models that do nothing between the embedding and the layers, nor between two
layers (`Family.pipeline`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from carpool.families import FAMILIES, family_of
from carpool.hf.seam.find_modules import list_number
from carpool.hf.sharding import replaced
from carpool.parallel import fsdp
from carpool.parallel.pipeline import cut

ALL_PARALLEL_STYLES.register("carpool_absent", TensorParallelLayer())


class Part(NamedTuple):
    """A stage: its layers, and whether the embedding is before them, and the norm and the head are behind them."""

    layers: range
    first: bool
    last: bool


class Absent(nn.Module):
    """Stands where another stage has a module, and hands on what it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class _End(nn.Module):
    """Stands for the norm of a stage that is not the last one: here its hidden states are taken."""

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        if (found := _CAPTURED.get()) is not None:
            found.append(hidden_BLH)
        return hidden_BLH


class _NoHead(nn.Module):
    """Stands for its head. FSDP wants what the backward begins with among the outputs of the model's forward."""

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        found = _CAPTURED.get()
        return hidden_BLH if found is None else found[-1]


_CAPTURED: ContextVar[list[torch.Tensor] | None] = ContextVar("captured", default=None)


def why_not_cut(model: PreTrainedModel) -> str | None:
    """Why a model cannot be cut into stages; None: it can."""
    name = type(model).__name__
    base = model.base_model
    for attribute, kind in (("layers", nn.ModuleList), ("embed_tokens", nn.Module), ("norm", nn.Module)):
        if not isinstance(getattr(base, attribute, None), kind):
            return f"{name} does not keep its layers as an embedding, a list of layers and a norm"
    if _head_name(model) is None:
        return f"{name} has no output layer beside its layers"
    if not family_of(model).pipeline:
        known = ", ".join(name for name, one in FAMILIES.items() if one.pipeline)
        return f"{name} has not been compared with its stages, as models of the types {known} have"
    return None


def cut_model(blueprint: PreTrainedModel, stages: int) -> list[Part]:
    """Which layers each stage has: equally much to compute, the head included.

    Args:
        blueprint: the whole model; its parameters may be on the device "meta".

    Raises:
        ValueError: the model cannot be cut, or not into so many stages.
    """
    if why := why_not_cut(blueprint):
        raise ValueError(f"{why}: it cannot be cut into stages; set parallelism.pp_size = 1")
    base = blueprint.base_model
    # A matrix costs a token one multiplication for each element; of the experts, those that it visits.
    costs = [_multiplications(layer, blueprint.config) for layer in cast(Any, base).layers]
    head = cast(nn.Module, blueprint.get_output_embeddings())
    ranges = cut(costs, stages, last=float(sum(parameter.numel() for parameter in head.parameters())))
    return [Part(layers, i == 0, i == stages - 1) for i, layers in enumerate(ranges)]


def _multiplications(layer: nn.Module, config: Any) -> float:
    text = config.get_text_config()
    key = family_of(text).top_k_key(text)
    total = 0.0
    for module in layer.modules():
        for parameter in module.parameters(recurse=False):
            visited = getattr(text, key) / parameter.shape[0] if parameter.dim() == 3 and key else 1.0
            total += parameter.numel() * visited if parameter.dim() > 1 else 0.0
    return total


def check_tied(model: PreTrainedModel, parts: Sequence[Part]) -> None:
    """Raise ValueError if embedding and head share a weight, and one of them is on another rank than these stages."""
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    if getattr(model, "all_tied_weights_keys", None) and first != last:
        raise ValueError(
            f"{type(model).__name__} ties the weights of its embedding and its output layer, which this pipeline has "
            'on two ranks: set parallelism.pp_schedule="ZBVZeroBubble" or "DualPipeV", which have both on one rank, or '
            "untie them (model.config.tie_word_embeddings=false)"
        )


def keep_parts(model: PreTrainedModel, parts: Sequence[Part]) -> None:
    """Take away what none of these stages has. The model is on the device "meta", and not sharded yet. ValueError: as
    `check_tied`."""
    check_tied(model, parts)
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    if not first:
        model.all_tied_weights_keys = {}
    base: Any = model.base_model
    kept = {layer for part in parts for layer in part.layers}
    gone = [number for number in range(len(base.layers)) if number not in kept]
    for number in gone:
        base.layers[number] = Absent()
    # What a checkpoint's files have of these is not to be told as unexpected.
    elsewhere = [rf"\.layers\.({'|'.join(map(str, gone))})\."] if gone else []
    elsewhere += [] if first else [r"\.embed_tokens\."]
    elsewhere += [] if last else [r"\.norm\.", rf"^{_head_name(model)}\."]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *elsewhere}
    absent: dict[str, nn.Module] = {}
    if not first:
        absent[_name_of(model, base.embed_tokens)] = Absent()
    if not last:
        absent |= {_name_of(model, base.norm): _End(), cast(str, _head_name(model)): _NoHead()}
    for name, module in absent.items():
        model.set_submodule(name, module)
    # Tensor parallelism does nothing about what is not there. A plan without rules would be refused.
    rules = {rule: style for rule, style in model.tp_plan.items() if rule.removesuffix(".weight") not in absent}
    model.tp_plan = rules | {rule: "carpool_absent" for rule in model.tp_plan if rule in absent}


def kept_parts(parts: Sequence[Part]) -> AbstractContextManager[None]:
    """Inside, models that transformers builds keep these stages alone, before they are sharded and weights are read
    (`keep_parts`). No stages: they are whole."""
    if not parts:
        return nullcontext()
    before = vars(DistributedMixin)["maybe_distribute_model"]

    def cut_first(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        keep_parts(model, parts)
        return before.__func__(cls, model, *args, **kwargs)

    return replaced(DistributedMixin, "maybe_distribute_model", classmethod(cut_first))


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _head_name(model: PreTrainedModel) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, child in model.named_children() if child is head and head is not None), None)


class Stages:
    """The stages of a model that `keep_parts` has cut, sharded or not, to be run one at a time. `parts`: those of this
    rank, by the number of the stage."""

    def __init__(self, model: PreTrainedModel, parts: dict[int, Part]) -> None:
        self.model, self.parts = model, parts
        # FSDP looks for what it shards in the first forward, and what is then taken out it would not find.
        fsdp.find_all(model)
        base: Any = model.base_model
        absent, end, no_head = Absent(), _End(), _NoHead()
        head = cast(str, _head_name(model))
        self._swaps: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
        for number, part in parts.items():
            layers = [layer if i in part.layers else absent for i, layer in enumerate(base.layers)]
            swaps: list[tuple[nn.Module, str, nn.Module]] = [(base, "layers", nn.ModuleList(layers))]
            if not part.last:
                swaps += [(base, "norm", end), (model, head, no_head)]
            self._swaps[number] = swaps

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Inside, the model's forward is that of one stage; its embeddings are what the stage before made."""
        before = [(owner, name, owner._modules[name]) for owner, name, _ in self._swaps[number]]
        for owner, name, module in self._swaps[number]:
            owner._modules[name] = module
        try:
            yield
        finally:
            for owner, name, whole in before:
                owner._modules[name] = whole

    def hidden(self, number: int, **inputs: Any) -> torch.Tensor:
        """What a stage that is not the last one hands on: (B, L, H). `inputs`: of the model's forward, `input_ids` of
        the first stage, `inputs_embeds` of others."""
        found: list[torch.Tensor] = []
        token = _CAPTURED.set(found)
        try:
            with self.only(number):
                self.model(**inputs)
        finally:
            _CAPTURED.reset(token)
        (hidden_BLH,) = found
        return hidden_BLH


def layer_number(name: str) -> int:
    """Of the layer that a module such as "model.layers.3.mlp.gate" is in."""
    place = list_number(name)
    assert place is not None, f"{name} is in no layer"
    return int(name.split(".")[place])
