"""The frozen matrices of a transformers model in 4 or 8 bits, under adapters (QLoRA, arXiv 2305.14314).

    experts.gate_up_proj, .down_proj    stand for their shape, dtype and device, and have no memory
    linear layers, embeddings           the same with their `weight`, which is dequantised for each product, of a large
                                        one part by part; of an embedding only the rows of the tokens at hand are
    codes and scales                    beside them, of this rank's experts; rides read these

Routers, norms and biases stay as they are, and so do small matrices (gates), layers around a convolution, whose code
reads weights itself, and what is trained. On several ranks all but the experts stay: FSDP shards them.

A model is quantised while it is loaded, where Transformers gives a module its parameter: no more than one layer's
experts are there as the files have them. Codes depend on the files' values alone, so a resumed run finds the same. Such
a model cannot be saved, and adapters cannot be merged into it: that is for the files it was loaded from.

A checkpoint that is published in MXFP4 (gpt-oss) has codes and scales of its experts in its files. They are read as
they are (`PackedExperts`), so that this base is exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading, modeling_utils

from carpool.experts.base import stand_in
from carpool.experts.quantised import Kind, Quantised, by_rows, dequantised_rows, quantise, quantised_bytes, why_not
from carpool.hf.seam.experts_module import QUANTISED, base_of, expert_function, weight_names
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.hf.sharding import replaced
from carpool.hf.weights.mxfp4_files import BLOCKS, SCALES
from carpool.hf.weights.weight_files import stored_weights
from carpool.kernels.cross_entropy import Layer, add_product
from carpool.parallel import fsdp

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
# Rows and columns of the smallest matrix that is quantised.
_LEAST = 64


@torch.library.custom_op("carpool::quantised_linear", mutates_args=())
def quantised_linear(
    x: torch.Tensor, code: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight.T + bias` in the dtype of x. Neither direction keeps the weight: an operator of its own, so that
    neither autograd nor a compiler does. Of a large one there is a part at a time."""
    x_TI, out_TO = x.flatten(0, -2), x.new_empty(0)
    for rows, matrix_OI in by_rows(code, scale, x.dtype):
        if len(matrix_OI) == code.shape[1]:
            return F.linear(x, matrix_OI, bias)
        out_TO = out_TO if rows.start else x.new_empty(len(x_TI), code.shape[1])
        if bias is None:
            torch.mm(x_TI, matrix_OI.t(), out=out_TO[:, rows])
        else:
            torch.addmm(bias[rows], x_TI, matrix_OI.t(), out=out_TO[:, rows])
        del matrix_OI  # else it would be there beside the next one
    return out_TO.view(*x.shape[:-1], code.shape[1])


@torch.library.custom_op("carpool::quantised_linear_backward", mutates_args=())
def quantised_linear_backward(dy: torch.Tensor, code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradient of x. Of parts it is added up in float32, and rounded once."""
    wide, dx_TI = torch.float64 if dy.dtype == torch.float64 else torch.float32, dy
    for rows, matrix_OI in by_rows(code, scale, dy.dtype):
        if len(matrix_OI) == code.shape[1]:
            return dy @ matrix_OI
        dy_TO = dy.flatten(0, -2)
        dx_TI = dx_TI if rows.start else dy.new_zeros(len(dy_TO), matrix_OI.shape[1], dtype=wide)
        add_product(dx_TI, dy_TO[:, rows], matrix_OI)
        del matrix_OI
    return dx_TI.view(*dy.shape[:-1], dx_TI.shape[1]).to(dy.dtype)


@quantised_linear.register_fake
def _(x: torch.Tensor, code: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], code.shape[1])


@quantised_linear_backward.register_fake
def _(dy: torch.Tensor, code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(*dy.shape[:-1], code.shape[2] * (2 if code.dtype == torch.uint8 else 1))


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return quantised_linear_backward(dy.contiguous(), *ctx.saved_tensors), None, None, None


quantised_linear.register_autograd(_backward, setup_context=_keep_codes)


class QuantisedLinear(nn.Linear):
    """A linear layer with codes and scales in the place of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return quantised_linear(x, *base_of(self)["weight"], bias)

    def as_layer(self) -> Layer:
        """How a loss multiplies by it."""
        codes = base_of(self)["weight"]
        return Layer(lambda x, b: quantised_linear(x, *codes, b), lambda dy: quantised_linear_backward(dy, *codes))


class QuantisedEmbedding(nn.Embedding):
    """An embedding with codes and scales in the place of its weight."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return dequantised_rows(*base_of(self)["weight"], index, self.weight.dtype)


_CLASSES: dict[type, type] = {nn.Linear: QuantisedLinear, nn.Embedding: QuantisedEmbedding}


def layer_kind(kind: Kind) -> Kind:
    """How layers are kept beside experts of this kind: in MXFP4 only experts are published."""
    return "nf4" if kind == "mxfp4" else kind


def quantisable_layers(model: PreTrainedModel, kind: Kind, keep: Sequence[str] | None = ()) -> dict[str, nn.Module]:
    """The layers of a model, on one rank, whose weights a base of this kind quantises, by their names.

    Args:
        keep: ends of the names of modules that stay as they are. None: all do."""
    if keep is None:
        return {}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    routers = [router for name in experts_modules(model) if (router := find_router(model, name)) is not None]
    inside = {id(module) for router in routers for module in router.modules()}
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            inside |= {id(child) for child in module.children()}
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in _CLASSES
        and id(module) not in inside
        and not any(name == one or name.endswith(f".{one}") or f".{one}." in f".{name}" for one in keep)
        and min(weight := cast(Any, module).weight.shape) >= _LEAST
        and why_not(layer_kind(kind), weight) is None
    }
    if getattr(model.config, "tie_word_embeddings", False):
        # One weight: both or neither.
        both = {name for name, module in found.items() if module is head or module is embedding}
        found = {name: module for name, module in found.items() if len(both) != 1 or name not in both}
    return found


class PackedExperts:
    """The experts of a checkpoint in MXFP4, read from its files tensor by tensor.

    model.layers.0.mlp.experts.gate_up_proj_blocks    (E, outputs, inputs / 32, 16) bytes
    model.layers.0.mlp.experts.gate_up_proj_scales    (E, outputs, inputs / 32)
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stored = folder, stored_weights(folder)

    def has(self, name: str) -> bool:
        """Whether the parameter of this name is in MXFP4."""
        return name + BLOCKS in self._stored

    def read(self, name: str, device: torch.device) -> Quantised:
        """Codes and scales of the parameter of this name."""
        found = []
        for key in (name + BLOCKS, name + SCALES):
            # Opened for one tensor: what is mapped counts as this process's memory while it is open.
            with safe_open(self._folder / self._stored[key].file, framework="pt") as file:
                found.append(file.get_tensor(key).to(device))
        return Quantised(found[0].flatten(2), found[1])


class QuantisedBase:
    """Takes the values of a model's parameters, one after the other, as they are loaded.

    Args:
        kind: how matrices are kept; None: only what `packed` has is.
        keep: as of `quantisable_layers`.
        packed: experts that the files have in MXFP4; these stay so.
    """

    def __init__(self, kind: Kind | None, keep: Sequence[str] | None = (), packed: PackedExperts | None = None) -> None:
        self.kind, self.keep, self.packed = kind, keep, packed
        self._layers: dict[str, nn.Module] | None = None

    def take(self, model: PreTrainedModel, name: str) -> None:
        """Quantise the parameter of this name, which has just got its value, if it is to be.

        Raises:
            ValueError: experts that cannot be quantised."""
        path, _, weight = name.rpartition(".")
        module: Any = model.get_submodule(path)
        parameter = module._parameters.get(weight)
        if parameter is None or parameter.is_meta:  # of another shape than the model's
            return
        if hasattr(module, "is_transposed") and weight in weight_names(module)[:2]:
            if self.packed is not None and self.packed.has(name):
                _attach(module, weight, self.packed.read(name, parameter.device))
            elif self.kind is not None:
                check_can_be_quantised(path, module, self.kind)
                _quantise_parameter(module, weight, self.kind)
        elif self.kind is not None and weight == "weight" and not isinstance(parameter, DTensor):
            if self._layers is None:
                self._layers = quantisable_layers(model, self.kind, self.keep)
            if path in self._layers:
                _quantise_layer(module, layer_kind(self.kind))


def share_tied(model: PreTrainedModel) -> None:
    """Give an output layer whose weight is that of a quantised embedding its codes."""
    head, embedding = cast(Any, model.get_output_embeddings()), cast(Any, model.get_input_embeddings())
    # The ends of a model in stages have stand-ins, which have no weight.
    if type(head) is nn.Linear and base_of(embedding) and head.weight is embedding.weight:
        _attach(head, "weight", base_of(embedding)["weight"], cast(nn.Parameter, embedding.weight))
        head.__class__ = QuantisedLinear


def check_can_be_quantised(name: str, experts: nn.Module, kind: Kind) -> None:
    """Raise ValueError for experts that cannot be quantised. `name`: of the module."""
    if expert_function(experts) is None:
        raise ValueError(
            f"{name} ({type(experts).__name__}) runs the model's own forward, which cannot read weights in {kind}: "
            'leave adapter.base_dtype out (base="none")'
        )
    for weight in weight_names(experts)[:2]:
        if why := why_not(kind, expert_shape(experts, weight, kind)):
            other = "" if kind == "int8" else ' (adapter.base_dtype="int8" takes any size)'
            raise ValueError(f"{name}.{weight} cannot be kept in {kind}: {why}{other}")


def expert_shape(experts: Any, name: str, kind: Kind) -> tuple[int, int, int]:
    """The shape in which a stack of experts' matrices is quantised: of MXFP4, rows are outputs."""
    number, rows, columns = experts.get_parameter(name).shape
    return (number, columns, rows) if kind == "mxfp4" and experts.is_transposed else (number, rows, columns)


def base_bytes(model: PreTrainedModel, kind: Kind, keep: Sequence[str] | None) -> tuple[int, int]:
    """Of the layers of a model on the meta device that a base of this kind quantises: their parameters, each once, and
    the bytes of their codes and scales."""
    weights = {id(w): w for one in quantisable_layers(model, kind, keep).values() for w in [cast(Any, one).weight]}
    if getattr(model.config, "tie_word_embeddings", False):
        # Not yet tied on the meta device.
        head: Any = model.get_output_embeddings()
        weights.pop(id(head.weight), None) if head.weight is not model.get_input_embeddings().weight else None
    sizes = [quantised_bytes(layer_kind(kind), (1, *weight.shape)) for weight in weights.values()]
    return sum(weight.numel() for weight in weights.values()), sum(sizes)


def quantise_experts(model: nn.Module, kind: Kind) -> int:
    """Quantise the experts of a model that is loaded, layer by layer. Before adapters are added.

    Returns:
        The bytes of codes and scales on this rank. ValueError: experts that cannot be quantised, or that data-parallel
        ranks shard.
    """
    layers = {name: module for name, module in model.named_modules() if "_carpool_rides" in vars(module)}
    if not layers:
        raise ValueError("this model has no layers of Carpool, whose experts could be quantised")
    if kind == "mxfp4":
        raise ValueError("experts are quantised to MXFP4 while they are loaded (quantised_while_loading), not later")
    for name, experts in layers.items():
        check_can_be_quantised(name, experts, kind)
        meshes = [one.device_mesh.mesh_dim_names or () for one in experts.parameters() if isinstance(one, DTensor)]
        if fsdp.groups_of(experts) or any("efsdp" in axes for axes in meshes):
            raise ValueError(f"{name}: data-parallel ranks shard these experts, so they cannot be quantised")
    for experts in layers.values():
        for weight in weight_names(experts)[:2]:
            _quantise_parameter(experts, weight, kind)
    return sum(one.nbytes for experts in layers.values() for one in base_of(experts).values())


@contextmanager
def quantised_while_loading(kind: Kind | None, keep: Sequence[str] | None = ()) -> Iterator[None]:
    """Inside, `from_pretrained` quantises experts, linear layers and embeddings as it reads them. kind None: it does
    not. keep: ends of the names of modules, such as lm_head, that stay as they are; None: only experts are quantised.

        with quantised_while_loading("nf4"):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0})
        carpool.hf.install(model)  # on one process, without a DistributedConfig

    Raises:
        ValueError: experts that cannot be quantised.
    """
    if kind is None:
        yield
        return
    put, in_turn = core_model_loading.set_param_for_module, os.environ.get(_IN_TURN)
    tie, base = modeling_utils.PreTrainedModel.tie_weights, QuantisedBase(kind, keep)

    def put_quantised(model: Any, name: str, *args: Any) -> None:
        put(model, name, *args)
        base.take(model, name)

    def tie_quantised(model: Any, *args: Any, **kwargs: Any) -> None:
        tie(model, *args, **kwargs)
        share_tied(model)

    # Other threads would read weights faster than this one quantises them.
    os.environ[_IN_TURN] = "1"
    # The warm-up takes the memory that the whole model would need.
    no_warm_up = replaced(modeling_utils, "caching_allocator_warmup", lambda *_: None)
    tied = replaced(modeling_utils.PreTrainedModel, "tie_weights", tie_quantised)
    try:
        with replaced(core_model_loading, "set_param_for_module", put_quantised), no_warm_up, tied:
            yield
    finally:
        del os.environ[_IN_TURN]
        os.environ.update({} if in_turn is None else {_IN_TURN: in_turn})


@torch.no_grad()
def _quantise_parameter(experts: Any, name: str, kind: Kind) -> None:
    parameter = experts._parameters[name]
    whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    turned = kind == "mxfp4" and experts.is_transposed
    _attach(experts, name, quantise(whole.transpose(1, 2) if turned else whole, kind))


@torch.no_grad()
def _quantise_layer(layer: nn.Module, kind: Kind) -> None:
    _attach(layer, "weight", quantise(cast(Any, layer).weight.detach().unsqueeze(0), kind))
    layer.__class__ = _CLASSES[type(layer)]


def _attach(module: Any, name: str, codes: Quantised, parameter: nn.Parameter | None = None) -> None:
    """Put codes and scales in the place of a parameter. `parameter`: what stands for it, if it is there."""
    own = module._parameters[name]
    if not base_of(module):
        object.__setattr__(module, QUANTISED, {})
        module.register_state_dict_post_hook(_leave_out)
    base_of(module)[name] = codes
    if parameter is None:
        local = own.to_local() if isinstance(own, DTensor) else own
        empty = stand_in(local.shape, local.dtype, local.device)
        parameter = nn.Parameter(
            fsdp.dtensor_like(empty, own) if isinstance(own, DTensor) else empty, requires_grad=False
        )
        cast(Any, parameter)._is_hf_initialized = True  # as transformers says of what it has loaded
    module._parameters[name] = parameter


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state has no values for what is quantised: whoever loads it as a model is told that they are missing."""
    for name in base_of(module):
        state.pop(prefix + name, None)
