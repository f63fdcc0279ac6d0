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
states of the one before, and where a model changes embeddings before its layers, they are put in once more behind that.

No list says which models can be cut: a forward with probes in the place of the layers shows what a model does around
them (`find_chain`), and `tests/train/test_pipeline.py` compares all that pass with their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from carpool.families import family_of
from carpool.hf.documents import unpacked
from carpool.hf.multi_token import multi_token_layers
from carpool.hf.seam.find_modules import experts_modules, list_number
from carpool.hf.sharding import replaced
from carpool.parallel import fsdp
from carpool.parallel.schedules import cut

ALL_PARALLEL_STYLES.register("carpool_absent", TensorParallelLayer())


class Part(NamedTuple):
    """A stage: its layers, and whether the embedding is before them, and norm and head are behind them, with the
    multi-token prediction layers."""

    layers: range
    first: bool
    last: bool


class Chain(NamedTuple):
    """Where a model has its decoder layers, and what is around them.

    Attributes:
        owner: the name of the module whose forward calls the layers one after the other.
        layers, norm: names there, of the list and of what gets the last layer's hidden states.
        changes: whether the first layer gets something else than embeddings.
    """

    owner: str
    layers: str
    norm: str
    changes: bool


class Absent(nn.Module):
    """Stands where another stage has a module, and hands on what it gets. `layer`: the module, whose settings (such as
    its kind of attention) the model's forward may read."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        own = {} if layer is None else vars(layer)
        plain = {name: value for name, value in own.items() if not name.startswith("_") and not callable(value)}
        self.__dict__ |= plain | {"training": self.training}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class _End(nn.Module):
    """Stands for the norm of a stage that is not the last one: here its hidden states are taken, and what else it hands
    on is made, inside of the model's forward."""

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        if (found := _CAPTURED.get()) is not None:
            found.made = (hidden_BLH, *(make() for make in found.more))
        return hidden_BLH


class _NoHead(nn.Module):
    """Stands for its head. FSDP wants what the backward begins with among the outputs of the model's forward."""

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        found = _CAPTURED.get()
        return hidden_BLH if found is None else found.made[0]


class _Begin(Absent):
    """Stands for the last layer of the stage before: its hidden states, whatever has been made of embeddings."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = _RECEIVED.get()
        return super().forward(*args, **kwargs) if received is None else received


@dataclass
class _Captured:
    """What a stage hands on: `more` makes what it does beside hidden states."""

    more: Sequence[Callable[[], torch.Tensor]]
    made: tuple[torch.Tensor, ...] = ()


_CAPTURED: ContextVar[_Captured | None] = ContextVar("captured", default=None)
_RECEIVED: ContextVar[torch.Tensor | None] = ContextVar("received", default=None)
_ATTRIBUTE = "_carpool_chain"


class _Probe(nn.Module):
    """Stands for a layer while `find_chain` looks: notes what it is called with, and makes something new."""

    def __init__(self, layer: nn.Module, calls: list[tuple[torch.Tensor, list[Any], torch.Tensor]]) -> None:
        super().__init__()
        self.__dict__ |= {"layer": layer, "calls": calls}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        first = args[0] if args else kwargs.pop("hidden_states")
        made = torch.empty_like(first).requires_grad_()
        self.calls.append((first, tree_leaves((args[1:], kwargs)), made))
        return made


class _NoValues(TorchDispatchMode):
    """Inside, whoever asks for a number on the device "meta" gets 0, such as rotary embeddings that ask how long a
    sequence is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **kwargs or {})


def find_chain(model: PreTrainedModel) -> Chain:
    """How a model calls its layers, whose parameters may be on the device "meta".

    Raises:
        ValueError: not one after the other, each with nothing but the last one's hidden states; the message says what
            stands in the way of stages."""
    name, config = type(model).__name__, model.config.get_text_config()
    if _head_name(model) is None:
        raise ValueError(f"{name} has no output layer beside its layers")
    lists = {".".join(one.split(".")[: list_number(one)]) for one in experts_modules(model)}
    if len(lists) != 1 or config.is_encoder_decoder:
        raise ValueError(f"{name} does not keep its layers in one list")
    owner_name, _, layers = lists.pop().rpartition(".")
    owner, embedding = model.get_submodule(owner_name), cast(nn.Module, model.get_input_embeddings())
    calls: list[tuple[torch.Tensor, list[Any], torch.Tensor]] = []
    embedded, entered = list[Any](), list[tuple[str, Any]]()
    further = set(multi_token_layers(model).values())
    own = [layer for layer in cast(nn.ModuleList, getattr(owner, layers)) if layer not in further]
    probes = nn.ModuleList(_Probe(layer, calls) for layer in own)
    hooks = [embedding.register_forward_hook(lambda _, args, made: embedded.append(made))]
    for child, module in owner.named_children():
        if child != layers:
            note = partial(lambda child, _, args: entered.append((child, args[0] if args else None)), child)
            hooks.append(module.register_forward_pre_hook(note))
    device = next(embedding.parameters()).device
    ids_BL = torch.zeros(2, 3, dtype=torch.long, device=device)
    received_BLH = torch.zeros(2, 3, config.hidden_size, dtype=model.dtype, device=device)
    # A forward may keep what it has made, which would stay on the device "meta".
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        with unpacked(), torch.enable_grad(), _NoValues(), replaced_module(owner, layers, probes):
            model(input_ids=ids_BL, use_cache=False)
            found = list(calls)
            norm = next((child for child, given in entered if found and given is found[-1][2]), None)
            if any(given is ids_BL or getattr(given, "requires_grad", False) for _, some, _ in found for given in some):
                raise ValueError("its layers get what other stages do not have")
            model(inputs_embeds=received_BLH, use_cache=False)
            if _given(calls[len(found) :]) != _given(found):
                raise ValueError("its layers get something else without token ids")
    except Exception as error:
        # Also whatever a model's own code raises where its layers return one tensor, or where there are no token ids.
        why = str(error).split("\n")[0]
        raise ValueError(f"{name} does not hand on hidden states alone from layer to layer ({why})") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, attributes, buffers in before:
            module.__dict__ = attributes
            module._buffers.clear()
            module._buffers.update(buffers)
    links = zip((first for first, _, _ in found[1:]), (made for _, _, made in found), strict=False)
    if len(found) != len(probes) or any(first is not made for first, made in links) or norm is None:
        raise ValueError(f"{name} does not call its layers one after the other, and then a norm")
    if found[0][0].shape != received_BLH.shape:
        raise ValueError(f"{name} has hidden states of another shape between its layers than behind them")
    return Chain(owner_name, layers, norm, all(found[0][0] is not one for one in embedded))


def _given(calls: Sequence[tuple[torch.Tensor, list[Any], torch.Tensor]]) -> list[Any]:
    """What each layer gets beside hidden states, as far as shapes and types tell."""
    return [[getattr(given, "shape", type(given)) for given in some] for _, some, _ in calls]


@contextmanager
def replaced_module(owner: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """Inside, a module has another child of this name."""
    before = owner._modules[name]
    owner._modules[name] = module
    try:
        yield
    finally:
        owner._modules[name] = before


def cut_model(blueprint: PreTrainedModel, stages: int) -> list[Part]:
    """Which layers each stage has: equally much to compute, the head and multi-token prediction layers included.

    Args:
        blueprint: the whole model; its parameters may be on the device "meta".

    Raises:
        ValueError: the model cannot be cut, or not into so many stages.
    """
    try:
        chain = find_chain(blueprint)
    except ValueError as why:
        raise ValueError(f"{why}: it cannot be cut into stages; set parallelism.pp_size = 1") from why
    # A matrix costs a token one multiplication for each element; of the experts, those that it visits.
    costs = [_multiplications(layer, blueprint.config) for layer in _layers(blueprint, chain)]
    head = cast(nn.Module, blueprint.get_output_embeddings())
    last, further = float(sum(parameter.numel() for parameter in head.parameters())), len(multi_token_layers(blueprint))
    own = len(costs) - further
    ranges = cut(costs[:own], stages, last=last * (1 + further) + sum(costs[own:]))
    return [Part(layers, i == 0, i == stages - 1) for i, layers in enumerate(ranges)]


def _layers(model: nn.Module, chain: Chain) -> nn.ModuleList:
    return cast(nn.ModuleList, getattr(model.get_submodule(chain.owner), chain.layers))


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
    chain = find_chain(model)
    object.__setattr__(model, _ATTRIBUTE, chain)
    layers, norm = _layers(model, chain), ".".join(filter(None, (chain.owner, chain.norm)))
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    kept = {layer for part in parts for layer in part.layers}
    if last:
        kept |= set(range(len(layers) - len(multi_token_layers(model)), len(layers)))
    gone = [number for number in range(len(layers)) if number not in kept]
    for number in gone:
        layers[number] = Absent(layers[number])
    # What a checkpoint's files have of these is not to be told as unexpected.
    elsewhere = [rf"\.{chain.layers}\.({'|'.join(map(str, gone))})\."] if gone else []
    elsewhere += [] if first else [rf"\.{embedding.rpartition('.')[2]}\."]
    elsewhere += [] if last else [rf"\.{chain.norm}\.", rf"^{_head_name(model)}\."]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *elsewhere}
    absent: dict[str, nn.Module] = {}
    if not first:
        absent[embedding] = Absent()
    if not last:
        absent |= {norm: _End(), cast(str, _head_name(model)): _NoHead()}
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
        chain: Chain = getattr(model, _ATTRIBUTE)
        owner, own = model.get_submodule(chain.owner), list(_layers(model, chain))
        head = cast(str, _head_name(model))
        self._swaps: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
        for number, part in parts.items():
            layers = [layer if i in part.layers else Absent(layer) for i, layer in enumerate(own)]
            if chain.changes and not part.first:
                layers[part.layers.start - 1] = _Begin(own[part.layers.start - 1])
            swaps: list[tuple[nn.Module, str, nn.Module]] = [(owner, chain.layers, nn.ModuleList(layers))]
            if not part.last:
                swaps += [(owner, chain.norm, _End()), (model, head, _NoHead())]
            self._swaps[number] = swaps

    @contextmanager
    def only(self, number: int, received_BLH: torch.Tensor | None = None) -> Iterator[None]:
        """Inside, the model's forward is that of one stage; its embeddings are what the stage before made."""
        token = _RECEIVED.set(received_BLH)
        try:
            with ExitStack() as swapped:
                for owner, name, module in self._swaps[number]:
                    swapped.enter_context(replaced_module(owner, name, module))
                yield
        finally:
            _RECEIVED.reset(token)

    def hidden(
        self, number: int, more: Sequence[Callable[[], torch.Tensor]] = (), **inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        """What a stage that is not the last one hands on: (B, L, H), and what is made inside of the model's forward.
        `inputs`: of that, `input_ids` of the first stage, `inputs_embeds` of others."""
        found = _Captured(more)
        token = _CAPTURED.set(found)
        try:
            with self.only(number, inputs.get("inputs_embeds")):
                self.model(**inputs)
        finally:
            _CAPTURED.reset(token)
        return found.made


def layer_number(name: str) -> int:
    """Of the layer that a module such as "model.layers.3.mlp.gate" is in."""
    place = list_number(name)
    assert place is not None, f"{name} is in no layer"
    return int(name.split(".")[place])
