"""What an experts module of transformers computes, as far as Carpool knows, and what has been done to it.

Classes that carry transformers' experts decorator say it by flags: has_gate, has_bias, is_transposed. Their activation
is found by the type of `act_fn`, or by the gate function. A module says so if its experts were cut into slices, made
narrow (`narrow_experts`) or quantised (`carpool.hf.held_experts`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from carpool.experts import Activation, ExpertFunction, ExpertWeights
from carpool.experts.quantised import Quantised
from carpool.families import family_of_class

# By exact type: a subclass may compute something else.
ACTIVATION_MODULES: dict[type, str] = {
    SiLUActivation: "silu", nn.SiLU: "silu", GELUActivation: "gelu", nn.GELU: "gelu", GELUTanh: "gelu_tanh",
    nn.ReLU: "relu", ReLUSquaredActivation: "relu2",
}  # fmt: skip
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Attributes of modules, past nn.Module: what stands for quantised parameters, what makes rows narrow and wide again.
QUANTISED, PROJECTIONS = "_carpool_base", "_carpool_projections"


def weight_names(experts: Any) -> tuple[str, str, str | None, str | None]:
    """Parameter names of a decorated experts module, in the order of `ExpertWeights`."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    return (up, "down_proj", f"{up}_bias", "down_proj_bias") if experts.has_bias else (up, "down_proj", None, None)


def expert_function(experts: Any) -> ExpertFunction | None:
    """What a decorated experts module computes, or None if only its own forward knows.

    The module must hold just the parameters that the decorator's flags announce: one more (a norm, a learned
    activation) would be left out of the computation and of its gradient."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
    if not all(hasattr(experts, flag) for flag in flags) or experts.has_post_expert_norm:
        return None
    if {name for name, _ in experts.named_parameters()} != {name for name in weight_names(experts) if name}:
        return None
    own = experts._apply_gate if experts.has_gate else experts.act_fn
    return ExpertFunction(_described(experts) or own, experts.is_transposed)


def _described(experts: Any) -> Activation | None:
    """The experts' activation in terms that our kernels know, or None if it is not known to be one of those."""
    if "_apply_gate" in vars(experts):
        return None  # somebody replaced the class's
    gate = type(experts)._apply_gate
    known = family_of_class(gate).gate
    if experts.has_gate and known is not None and gate.__qualname__ == known.function:
        numbers: Any = {name: float(getattr(experts, name)) for name in known.attributes}
        return Activation(**known.activation, **numbers)
    if experts.has_gate and gate is not _default_apply_gate:
        return None
    act = getattr(experts, "act_fn", None)
    name = "silu" if act is nn.functional.silu else ACTIVATION_MODULES.get(type(act))
    if name == "gelu" and getattr(act, "approximate", "none") == "tanh":  # of torch.nn.GELU
        name = "gelu_tanh"
    return Activation(name, experts.has_gate) if name is not None else None


def check_not_quantised(experts: Any) -> None:
    """Raise ValueError for experts whose weights are, or are to be loaded, quantised.

    transformers reads one shard of a weight on each rank, but its scales belong to whole blocks: loading fails on some
    ranks only, and the others wait for them for ever. So all ranks refuse before anything is read."""
    quantised = {str(p.dtype) for p in experts.parameters() if p.dtype not in TRAINABLE_DTYPES}
    config = getattr(getattr(experts, "config", None), "quantization_config", None)
    if quantised or config is not None:
        what = ", ".join(sorted(quantised)) or type(config).__name__
        raise ValueError(
            f"the experts are quantised ({type(experts).__name__}: {what}), which expert parallelism with Carpool does "
            "not support; load the checkpoint on one process, call model.dequantize(), and save it again"
        )


def base_of(experts: nn.Module) -> dict[str, Quantised]:
    """What an experts module has in the place of its parameters, by their names; empty: it is not quantised."""
    found: dict[str, Quantised] = vars(experts).get(QUANTISED, {})
    return found


def projections_of(experts: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """What projects the rows of an experts module, there and back; None: they travel as they are."""
    return getattr(experts, PROJECTIONS, None)


def slices_of(experts: nn.Module) -> int:
    """Into how many slices each expert of a module is cut."""
    return int(getattr(experts, "_carpool_slices", 1))


def fields_of(experts: Any) -> dict[str, str]:
    """The fields of `ExpertWeights` that the parameters of a decorated experts module are."""
    parameters = zip(weight_names(experts), ExpertWeights._fields, strict=False)
    return {parameter: field for parameter, field in parameters if parameter is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Narrow rows: tokens are projected to fewer elements before they travel, and sums are projected back (BigMac).
#
#     block    router(x_TH) -> choices;  descend(x_TH) -> rows of `size` travel -> experts -> ascend -> (T, H)
#
# This is ANOTHER MODEL: its experts are matrices of size x F in the place of H x F, and each block has two projections
# more. A configuration says so by `travel_size` (arXiv 2502.16927, section 3). Transformers builds the model without,
# and knows nothing of it; here its experts are made anew. So such a model is trained from scratch, resumed, evaluated
# and sampled by Carpool, and not exported. For the same number of parameters, make experts wider
# (moe_intermediate_size).

KEY = "travel_size"


def row_size(config: PreTrainedConfig) -> int:
    """Elements of a row that travels."""
    text: Any = config.get_text_config()
    return int(getattr(text, KEY, None) or text.hidden_size)


def is_narrow(config: PreTrainedConfig) -> bool:
    """Whether rows are projected before they travel."""
    return getattr(config.get_text_config(), KEY, None) is not None


def narrow_experts(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give a model whose configuration has a `travel_size` its narrow experts and their projections. Others stay.

    Args:
        model: just built, on the meta device.
        names: of its experts modules.

    Raises:
        ValueError: experts that cannot be made in another size.
    """
    if not is_narrow(model.config):
        return
    text: Any = model.config.get_text_config()
    size, hidden, narrow = row_size(model.config), text.hidden_size, copy.deepcopy(text)
    if size >= hidden:
        raise ValueError(
            f"model.travel_size = {size} makes no row smaller, for model.config.hidden_size is {hidden}: choose a "
            "smaller one, or leave it out"
        )
    narrow.hidden_size = size
    for name in names:
        path, _, key = name.rpartition(".")
        block, experts = model.get_submodule(path), model.get_submodule(name)
        place: Any = {"dtype": next(experts.parameters()).dtype, "device": "meta"}
        made = _made(type(experts), narrow, name).to(**place)
        before, after = ([p.shape for p in one.parameters()] for one in (experts, made))
        if len(before) != len(after) or any(size not in shape for shape in after if len(shape) == 3):
            raise ValueError(f"model.travel_size: the experts of {type(model).__name__} cannot have another size")
        block.descend = nn.Linear(hidden, size, bias=False, **place)
        block.ascend = nn.Linear(size, hidden, bias=False, **place)
        # Past nn.Module: they are the block's.
        object.__setattr__(made, PROJECTIONS, (block.descend, block.ascend))
        setattr(block, key, made)


def _made(cls: Any, config: PreTrainedConfig, name: str) -> nn.Module:
    try:
        made: nn.Module = cls(config)
    except Exception as error:  # each class takes what it likes
        raise ValueError(f"model.travel_size: {name} ({cls.__name__}) cannot be made anew: {error}") from error
    return made
