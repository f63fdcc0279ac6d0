"""Which parameters of a model are matrices of its layers, for optimizers that treat those apart (Muon).

nn.Linear of attention, MLPs and shared experts    a matrix
stacks of experts                                  a matrix for each expert; fused gate_up_proj: two
embeddings, output layer, routers, gates with one output, norms, biases, adapters, all else    none
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from carpool.experts import Activation
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.experts_module import expert_function, fields_of, slices_of
from carpool.hf.seam.find_modules import experts_modules, find_router
from carpool.optim.base import Matrices

# Parts of the names of linear modules that are none: of adapters, routers, and embeddings of patches and the like.
OTHERS = ("lora_", "router", "embed")


def layer_matrices(model: nn.Module) -> dict[str, Matrices]:
    """By the names of parameters. A weight that is an embedding or output layer elsewhere too is none."""
    found: dict[str, Matrices] = {}
    others: set[int] = set()
    layers = rides(model)
    experts = {name: own.experts for name, own in layers.items()}
    if not layers and isinstance(model, PreTrainedModel):
        experts = {name: model.get_submodule(name) for name in experts_modules(model)}
    for name in experts:
        if (router := find_router(model, name)) is not None:
            others |= {id(parameter) for parameter in router.parameters()}
    for ends in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, ends, lambda: None)()
        others |= {id(parameter) for parameter in module.parameters()} if module is not None else set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and min(module.weight.shape) > 1 and not any(one in name for one in OTHERS):
            found[f"{name}.weight"] = Matrices()
    for name, module in experts.items():
        order = tuple(row for rank in layers[name].layout.homes for row in rank) if layers else ()
        found |= {f"{name}.{key}": value for key, value in _of_experts(module, order).items()}
    named = dict(model.named_parameters())
    return {name: of for name, of in found.items() if name in named and id(named[name]) not in others}


def _of_experts(experts: Any, order: tuple[int, ...]) -> dict[str, Matrices]:
    """Of an experts module: of what its own forward alone knows, each parameter is one matrix an expert."""
    function = expert_function(experts)
    if function is None:
        return {name: Matrices(stacked=True) for name, p in experts.named_parameters(recurse=False) if p.dim() == 3}
    if isinstance(function.activation, Activation):
        gated, interleaved = function.activation.gated, function.activation.interleaved
    else:  # of a gate of the family's own it is not known which columns are whose
        gated, interleaved = experts.has_gate and type(experts)._apply_gate is _default_apply_gate, False
    # The dimension of F: rows of up, columns of down, unless they are transposed.
    inner = {"up_SFH": 2 if function.transposed else 1, "down_SHF": 1 if function.transposed else 2}
    slices = slices_of(experts)
    found: dict[str, Matrices] = {}
    for name, field in fields_of(experts).items():
        if field in inner:
            halves = inner[field] if gated and field == "up_SFH" else 0
            cut = (inner[field], slices, order) if slices > 1 else (0, 1, ())
            found[name] = Matrices(True, halves, interleaved and halves > 0, *cut)
    return found
