"""Which modules of a model are its experts, routers and decoder layers, and what its layers are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from carpool.families import family_of
from carpool.hf.seam.expert_rides import required_rides, rides


def name_layers(model: nn.Module) -> None:
    """Let profilers show the model's Carpool layers by their names (`carpool.metrics.counters.Meter`)."""
    layers = rides(model)
    for name, own in zip(short_names(list(layers)), layers.values(), strict=True):
        own.stats.meter.layer = name


def list_number(name: str) -> int | None:
    """The part of a module's dotted name that is its number in the first list of modules; None: it is in no list."""
    return next((i for i, part in enumerate(name.split(".")) if part.isdigit()), None)


def short_names(names: Sequence[str]) -> list[str]:
    """Of modules: their list and number in it, if that tells them apart: "layers.3" of "model.layers.3.mlp.experts"."""
    short = []
    for name in names:
        parts, number = name.split("."), list_number(name)
        short.append(name if number is None else ".".join(parts[max(0, number - 1) : number + 1]))
    return short if len(set(short)) == len(names) else list(names)


def experts_modules(model: PreTrainedModel, distributed_config: DistributedConfig | None = None) -> dict[str, int]:
    """The modules that expert parallelism dispatches to, by name, with the number of experts in each (of this rank,
    once the model is sharded). Empty if there are none. TypeError: no model of Transformers."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is no model of Transformers (PreTrainedModel)")
    override = distributed_config.ep_plan if distributed_config is not None else None
    plan = model._expand_parallel_plan((model.ep_plan or {}) | (override or {}))
    modules = (name for name, style in plan.items() if style == "ep_dispatch_experts")
    return {name: int(cast(Any, model.get_submodule(name)).num_experts) for name in modules}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of every `ModuleList` that has layers with experts, with Carpool's rides or without. ValueError:
    experts that are in no list."""
    lists: dict[str, nn.Module] = {}
    for name in rides(model) or experts_modules(cast(PreTrainedModel, model)):
        number = list_number(name)
        if number is None:
            raise ValueError(f"the experts {name!r} are in no list of layers, so there is no layer to compile")
        path = ".".join(name.split(".")[:number])
        lists[path] = model.get_submodule(path)
    return [layer for one in lists.values() for layer in one.children()]


def find_router(model: nn.Module, experts: str) -> nn.Module | None:
    """The router of an experts module: its sibling whose class says that it is one, or None."""
    parent = model.get_submodule(experts.rpartition(".")[0])
    children = [getattr(child, "get_base_layer", lambda child=child: child)() for child in parent.children()]
    ends = family_of(model).router
    found = [child for child in children if type(child).__name__.removeprefix("FSDP").endswith(ends)]
    return found[0] if len(found) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# Training only what decides and computes in MoE layers, as fine-tuning with limited routing does (Occult); or all but
# the experts, which then need neither gradients nor an update.


def freeze_non_experts(model: nn.Module) -> int:
    """Freeze all parameters but those of experts and their routers. Before the optimizer is made.

    Returns:
        How many parameters (elements, over all ranks) still train. ValueError: a model without Carpool's layers.
    """
    return freeze_all_but_experts(model, list(required_rides(model)))


def freeze_all_but_experts(model: nn.Module, experts: Iterable[str]) -> int:
    """As `freeze_non_experts`, of a model whose experts modules have these names; it need not have Carpool's layers."""
    trained: set[int] = set()
    for name in experts:
        for module in (model.get_submodule(name), find_router(model, name)):
            if module is not None:
                trained |= {id(parameter) for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained and parameter.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def freeze_experts(model: nn.Module, experts: Iterable[str]) -> None:
    """Freeze the parameters of experts modules with these names. Before the optimizer is made."""
    for name in experts:
        model.get_submodule(name).requires_grad_(False)
