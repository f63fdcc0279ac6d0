"""What the layers of a model save for their backward: its own forward is run, without memory and without values.

A formula for each family would be wrong for the next one. So the model's forward runs on PyTorch's fake tensors, which
have shapes and storages but no bytes, and what autograd saves is added up, each storage once:

    Qwen3-30B-A3B, 2 x 4096 tokens, bfloat16        625 MiB a layer and the ride's tokens, in 0.5 s on a laptop

Attention saves queries, keys, values, output and one number a token and head, as every fused kernel does; with a mask,
each layer saves numbers of its own of it: (batch, 1, length, length). Kernels of packages that Transformers calls where
they are installed (flash-linear-attention, causal-conv1d, mamba-ssm) save their inputs and outputs; without a package,
what PyTorch computes in its place is measured. Routed experts save their input; what their ride saves depends on the
transport, and the caller adds it (`carpool.planner.step.peak`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from carpool.hf.context_parallel import ContextParallel
from carpool.hf.documents import packed, packed_settings, unpacked
from carpool.hf.loss_head import output_layer
from carpool.hf.seam.find_modules import decoder_layers, experts_modules
from carpool.parallel.context import Cut, Shapes


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward keeps on one rank, without rides and the loss.

    Attributes:
        layers: of each decoder layer.
        rest: of what is outside of them: embedding, last norm, positions.
        layer_input: of the input of one layer, which a checkpointed one keeps.
    """

    layers: tuple[int, ...]
    rest: int
    layer_input: int


def measure_activations(
    model: PreTrainedModel,
    batch: int,
    length: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    expert_adapters: bool = False,
    documents: bool = False,
    cut: Cut | None = None,
    adapter_dtype: torch.dtype = torch.float32,
) -> Activations:
    """Run a forward of a model, which is on the meta device and is not changed, on fake tensors.

    Args:
        batch, length: sequences of a micro-batch and their tokens.
        dtype: of the parameters that compute; adapter_dtype: of adapters of peft.
        autocast: the dtype of `torch.autocast`, if it is used.
        expert_adapters: experts have adapters, which this model lacks: what they return needs a gradient.
        documents: sequences are packed documents, which a mask keeps apart.
        cut: the part of each sequence that a rank has, if ranks share them.
    """
    model = copy.deepcopy(model)
    adapters = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" in name]
    model.to(dtype)
    for name in adapters:
        model.get_parameter(name).data = model.get_parameter(name).data.to(adapter_dtype)
    layers = decoder_layers(model)
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}
    now = len(layers)  # the layer whose forward runs; len(layers): none
    inputs = 0

    def enter(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal now, inputs
            now = number
            inputs = (args[0] if args else kwargs["hidden_states"]).untyped_storage().nbytes()

        return hook

    def leave(*_: Any) -> None:
        nonlocal now
        now = len(layers)

    def pack(tensor: torch.Tensor) -> None:
        """Autograd keeps nothing: a node that holds its own output as a Python object would never be freed."""
        storage = tensor.untyped_storage()
        # The storage is held, so that no other gets its address.
        kept.setdefault(storage._cdata, (storage, now))

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(enter(number), with_kwargs=True)
        layer.register_forward_hook(leave)
    for name in experts_modules(model):
        experts = model.get_submodule(name)
        experts.forward = partial(_experts, experts, expert_adapters)  # type: ignore[assignment]
    if (head := output_layer(model)) is not None:
        head.forward = lambda hidden_BLH: hidden_BLH  # no logits
    context = None if cut is None else ContextParallel(model, cut, Shapes(cut.ranks))
    with FakeTensorMode(), packed() if documents else unpacked():
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        ids_BL = torch.zeros(batch, length, dtype=torch.int64)
        position_BL = torch.zeros_like(ids_BL) if documents else None
        settings = {} if position_BL is None else packed_settings(model, position_BL)
        whole: AbstractContextManager[None] = nullcontext()
        if context is not None:
            settings |= context.settings(ids_BL, position_BL)
            whole, ids_BL = context.whole(length, position_BL), context.cut.part(ids_BL)
        enabled = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        with saved_tensors_hooks(pack, _not_needed), _FusedAttention(), _kernels(model), enabled, whole:
            model.train()(input_ids=ids_BL, use_cache=False, **settings)
    bytes_of = [0] * (len(layers) + 1)
    for address, (storage, number) in kept.items():
        if address not in own:
            bytes_of[number] += storage.nbytes()
    return Activations(tuple(bytes_of[:-1]), bytes_of[-1], inputs)


class _Saves(torch.autograd.Function):
    """An operation that keeps tensors and returns a new one."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], keep_out: bool, *tensors: torch.Tensor) -> torch.Tensor:
        out = tensors[0].new_empty(shape)
        ctx.save_for_backward(*tensors, *([out] if keep_out else []))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("no backward follows")


class _FusedAttention(TorchFunctionMode):
    """Scaled dot-product attention keeps what a fused kernel keeps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
        batch, heads, length = query.shape[:3]
        row_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        # Kernels lay heads beside each other, so that the model's transpose back is no copy.
        kept = (row_sums,) if mask is None else (row_sums, query.new_empty(mask.shape))
        out = _Saves.apply((batch, length, heads, value.shape[-1]), True, query, key, value, *kept)
        return out.transpose(1, 2)


def optional_kernels(model: nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any], str, bool]]:
    """(module of Python, name, function in PyTorch, package, whether it is installed) of all that Transformers takes
    from a package for classes of a model, or else computes in PyTorch."""
    for namespace in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, function in list(vars(namespace).items()):
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename == hub_kernels.__file__ and "torch_function" in code.co_freevars:
                found = inspect.getclosurevars(function).nonlocals
                yield namespace, name, found["torch_function"], found["package"], found["is_new_implementation"]


def lacking_packages(model: nn.Module) -> list[str]:
    """Those of which Transformers would take kernels for a model, by the names under which they are installed."""
    lacking = {package for *_, package, there in optional_kernels(model) if not there}
    return sorted({"fla": "flash-linear-attention"}.get(package, package) for package in lacking)


@contextmanager
def _kernels(model: nn.Module) -> Iterator[None]:
    """Kernels of packages, which fake tensors have no values for, keep their inputs and outputs."""
    known: dict[Any, Any] = {}

    def keeps(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        key = function, *(one.shape for one in tensors)
        if key not in known:
            takes = inspect.signature(function).parameters
            with torch.no_grad():
                known[key] = function(*args, **{name: one for name, one in kwargs.items() if name in takes})
        return tree_map_only(torch.Tensor, lambda out: _Saves.apply(tuple(out.shape), True, *tensors), known[key])

    replaced = [(*found[:3], vars(found[0])[found[1]]) for found in optional_kernels(model) if found[4]]
    for namespace, name, function, _ in replaced:
        setattr(namespace, name, partial(keeps, function))
    try:
        yield
    finally:
        for namespace, name, _, before in replaced:
            setattr(namespace, name, before)


def _experts(experts: nn.Module, adapters: bool, hidden_TH: torch.Tensor, *_: Any, **__: Any) -> Any:
    # With parameters, which may need gradients where the rows do not.
    adapter = hidden_TH.new_empty(0, requires_grad=adapters)
    return _Saves.apply(tuple(hidden_TH.shape), False, hidden_TH, adapter, *experts.parameters())


def _not_needed(_: Any) -> Any:
    raise NotImplementedError("no backward follows")
