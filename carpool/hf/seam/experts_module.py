"""What an experts module of transformers computes, as far as Carpool knows, and what has been done to it.

Classes that carry transformers' experts decorator say it by flags: has_gate, has_bias, is_transposed. Their activation
is found by the type of `act_fn`, or by the gate function. A module says so if its experts were cut into slices or
quantised (`carpool.hf.quantised_base`), or if its tokens are projected before dispatch (`project_tokens`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from carpool.experts import Activation, ExpertFunction, ExpertWeights
from carpool.experts.quantised import Quantised, kind_of
from carpool.families import family_of_class
from carpool.layer.core import Projections

# By exact type: a subclass may compute something else.
ACTIVATION_MODULES: dict[type, str] = {
    SiLUActivation: "silu", nn.SiLU: "silu", GELUActivation: "gelu", nn.GELU: "gelu", GELUTanh: "gelu_tanh",
    nn.ReLU: "relu", ReLUSquaredActivation: "relu2",
}  # fmt: skip
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Attributes of modules, past nn.Module: what stands for quantised parameters, and `LayerCore.projections`.
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
    # Rows of MXFP4 are outputs, whichever way the parameters lie.
    turned = any(kind_of(one.scale) == "mxfp4" for one in base_of(experts).values())
    return ExpertFunction(_described(experts) or own, experts.is_transposed and not turned)


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


def base_of(module: nn.Module) -> dict[str, Quantised]:
    """What a module has in the place of its parameters, by their names; empty: it is not quantised."""
    found: dict[str, Quantised] = vars(module).get(QUANTISED, {})
    return found


def project_tokens(experts: nn.Module, before: nn.Module, after: nn.Module) -> None:
    """Have the tokens of an experts module pass `before` ahead of dispatch, and their sums `after` behind combine.
    Parameters of the two are of another module, in which they must be registered."""
    object.__setattr__(experts, PROJECTIONS, (before, after))


def projections_of(experts: nn.Module) -> Projections | None:
    """What tokens pass before dispatch, and their sums after combine; None: nothing."""
    return getattr(experts, PROJECTIONS, None)


def slices_of(experts: nn.Module) -> int:
    """Into how many slices each expert of a module is cut."""
    return int(getattr(experts, "_carpool_slices", 1))


def fields_of(experts: Any) -> dict[str, str]:
    """The fields of `ExpertWeights` that the parameters of a decorated experts module are."""
    parameters = zip(weight_names(experts), ExpertWeights._fields, strict=False)
    return {parameter: field for parameter, field in parameters if parameter is not None}
