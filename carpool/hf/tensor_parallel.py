"""Tensor and sequence parallelism (`carpool.parallel.sequence`) by a transformers model's own tensor-parallel plan.

transformers' styles keep every token on every tensor-parallel rank: each column-parallel layer reduces its own input
gradient, each row-parallel layer ends with an all-reduce. With sequence parallelism the same plan shards the same
weights, and tokens are divided from the first decoder layer to the loss:

    embeddings        all tokens
    first layer       takes this rank's tokens
      norms, residuals, router, rides, experts      this rank's tokens: none is gathered for a ride, none sliced
      attention, dense and shared experts' MLPs     all-gather before, reduce-scatter after: a *region*
    output layer      the loss of this rank's tokens, with the whole matrix (gathered); or logits of all tokens

    plan = sequence_plan(blueprint, tp_plan)        styles without collectives, for DistributedConfig(tp_plan=...)
    shard = shard_sequences(model)                  on the sharded model
    ...; loss.backward(); shard.sum_gradients()     once a step

A weight that the plan does not shard has on each rank the gradient of this rank's tokens (norms, routers) or heads
(norms of queries and keys): a term of a sum, which `sum_gradients` makes. Between a layer whose output is gathered and
one that splits its input (OLMoE, whose norms see all heads) every rank computes the same: nothing is to be summed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer

from carpool.families import Family, family_of
from carpool.hf.seam.expert_rides import rides
from carpool.hf.seam.find_modules import list_number
from carpool.parallel.sequence import (
    Group,
    gather_features,
    gather_tokens,
    own_tokens,
    scatter_sum,
    split_features,
    split_tokens,
    sum_gradients,
    sum_over,
)

# (B, L) of the micro-batch that this thread is at: two halves of one are in the model at the same time
# (`carpool.ride.two_batch`).
_SHAPE: ContextVar[tuple[int, int]] = ContextVar("shape")
# How layers are told (B, L): an argument that models hand on. A layer that is computed again is told again.
_ARGUMENT = "sequence_shape"

# transformers' styles, and what stands for them.
STYLES = {
    "colwise": "carpool_colwise",
    "rowwise": "carpool_rowwise",
    "colwise_gather_output": "carpool_colwise_gather_output",
    "rowwise_split_input": "carpool_rowwise_split_input",
    "replicated_with_grad_allreduce": "carpool_partial",
    "mla_kv_a_proj": "carpool_partial",
    "local_params": "local_params",
}


# ------------------------------------------------------------------------------------------------------------- styles


class _OnLocalTensors:
    """A module computes with this rank's parts of its weights, and takes its input as it comes."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        return args, kwargs


class _Colwise(_OnLocalTensors, ColwiseParallel):
    """Of all tokens, this rank's features (or, gathered, all of them). Gradients of its input are partial."""

    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.gather = gather

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        return gather_features(output, mesh.get_group()) if self.gather else output


class _Rowwise(_OnLocalTensors, RowwiseParallel):
    """From this rank's features of all tokens to all features of this rank's tokens."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split = split

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        return ((split_features(args[0], mesh.get_group()), *args[1:]) if self.split else args), kwargs

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        # Without its bias, which is of every row once.
        rows = scatter_sum(output.flatten(0, -2), mesh.get_group()).unsqueeze(0)
        bias = module._parameters.get("bias")
        if bias is None:
            return rows
        return rows + (bias.to_local() if isinstance(bias, DTensor) else bias)


ALL_PARALLEL_STYLES.register("carpool_colwise", _Colwise(gather=False))
ALL_PARALLEL_STYLES.register("carpool_colwise_gather_output", _Colwise(gather=True))
ALL_PARALLEL_STYLES.register("carpool_rowwise", _Rowwise(split=False))
ALL_PARALLEL_STYLES.register("carpool_rowwise_split_input", _Rowwise(split=True))
ALL_PARALLEL_STYLES.register("carpool_partial", TensorParallelLayer())


# --------------------------------------------------------------------------------------------------------------- plan


def why_not_sequence_parallel(model: PreTrainedModel, ep_size: int) -> str | None:
    """Why the tokens of a model, a blueprint, cannot be divided over its tensor-parallel ranks; None: they can."""
    if ep_size == 1:
        return "with ep_size = 1 tensor parallelism shards the experts themselves, which need every token"
    try:
        sequence_plan(model)
    except ValueError as error:
        return str(error)
    return None


def sequence_plan(model: PreTrainedModel) -> dict[str, str]:
    """Rules in the place of those of `model.tp_plan`, for `DistributedConfig.tp_plan`.

    Raises:
        ValueError: the model does more between its blocks than is known to be of one token by itself."""
    name, stem = type(model).__name__, _layers(model)
    layers = cast(nn.ModuleList, model.get_submodule(stem))
    _check_around(model, stem)
    changed: dict[str, str] = {}
    experts = {replace_layer_number_by_wildcard(one) for one in model.ep_plan or {}}
    for rule, style in model.tp_plan.items():
        if not rule.startswith(f"{stem}.*.") or any(rule == one or rule.startswith(f"{one}.") for one in experts):
            continue
        if style not in STYLES:
            raise ValueError(f"{name} has the tensor-parallel rule {rule}: {style}, which needs every token")
        changed[rule] = STYLES[style]
    styles = model._expand_parallel_plan(changed)
    for number, layer in enumerate(layers):
        _regions(layer, f"{stem}.{number}", styles, family_of(model))
    return changed


def _layers(model: PreTrainedModel) -> str:
    """The name of the list of decoder layers."""
    stems = set()
    for name in model._expand_parallel_plan(model.ep_plan or {}):
        number = list_number(name)
        if number is None:
            raise ValueError(f"the experts {name} of {type(model).__name__} are in no list of layers")
        stems.add(".".join(name.split(".")[:number]))
    if len(stems) != 1:
        raise ValueError(f"{type(model).__name__} has its experts in several lists of layers: {', '.join(stems)}")
    return stems.pop()


def _check_around(model: PreTrainedModel, stem: str) -> None:
    """Raise ValueError unless embeddings come before the layers, one norm after them, and (B, L) reaches them."""
    name = type(model).__name__
    base = model.get_submodule(stem.rpartition(".")[0])
    for child, module in base.named_children():
        known = child in (stem.rpartition(".")[2], "norm") or "embed" in child
        if not known and any(True for _ in module.parameters()):
            raise ValueError(f"{name} has {child} beside its layers, and may need every token there")
    for module in (base, next(iter(model.get_submodule(stem).children()))):
        forward = inspect.signature(type(module).forward)
        if not any(one.kind is one.VAR_KEYWORD for one in forward.parameters.values()):
            raise ValueError(f"{type(module).__name__} of {name} hands no further arguments on")


def _regions(layer: nn.Module, name: str, styles: dict[str, str], known: Family) -> dict[str, bool]:
    """Modules of a layer that see all tokens, by name within it; whether gradients of their input are partial.

    Raises:
        ValueError: a child that is neither attention, nor an MLP or a mixture, nor a norm."""
    found: dict[str, bool] = {}
    for child, module in layer.named_children():
        own = {rule: style for rule, style in styles.items() if rule.startswith(f"{name}.{child}.")}
        ends = {rule.removeprefix(f"{name}.") for rule, style in own.items() if "rowwise" in style}
        parents = {end.rpartition(".")[0] for end in ends & {one for one, _ in layer.named_modules()}}
        if child in known.attention:
            if own and parents != {child}:
                raise ValueError(f"the tensor-parallel plan of {name}.{child} has no row-parallel end")
            found[child] = bool(own)
        elif child in known.mlp:
            found |= dict.fromkeys(parents, True)
        elif "norm" not in child and any(True for _ in module.parameters()):
            raise ValueError(f"{name}.{child} may need every token")
    return found


# -------------------------------------------------------------------------------------------------------------- model


class SequenceShard:
    """Which of a micro-batch's tokens are this rank's, of a tensor-parallel group. `parameters`: whose gradients are
    terms of a sum over the group."""

    def __init__(self, group: Group, parameters: list[nn.Parameter]) -> None:
        self.group, self.ranks, self.parameters = group, dist.get_world_size(group), parameters

    def own(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what every rank has of all tokens (dimension 0)."""
        return own_tokens(x_T, self.group)

    def sum_gradients(self) -> None:
        """Once a step, after its last backward. Collective."""
        sum_gradients(self.parameters, self.group)


def shard_sequences(model: PreTrainedModel, firsts: Collection[int] = (0,)) -> SequenceShard:
    """Divide the tokens of a model over its tensor-parallel ranks, from its first layer on. On all ranks.

    Args:
        model: sharded by a plan with `sequence_plan`; before it is compiled.
        firsts: the layers that are given all tokens: of each stage of a pipeline, the first one."""
    group = model._mesh_manager.get_mesh("tp").get_group()
    stem = _layers(model)
    base = cast(Any, model.get_submodule(stem.rpartition(".")[0]))
    layers = cast(nn.ModuleList, model.get_submodule(stem))
    # The plan as it was applied: that of the configuration is in it.
    styles = model._expand_parallel_plan(model.tp_plan)
    alike: set[int] = set()
    for number, layer in enumerate(layers):
        for child, partial in _regions(layer, f"{stem}.{number}", styles, family_of(model)).items():
            region = layer.get_submodule(child)
            region.forward = _in_region(region.forward, group, partial)
            own = {style for rule, style in styles.items() if rule.startswith(f"{stem}.{number}.{child}.")}
            if not partial or "carpool_colwise_gather_output" in own:
                alike |= {id(parameter) for parameter in region.parameters()}
        layer.forward = _of_rows(layer.forward, group if number in firsts else None)
    base.forward = _with_shape(base.forward)
    shard = SequenceShard(group, list(_summed(base, layers, alike)))
    for ride in rides(model).values():
        ride.token_slice = (0, 1)
    head = model.get_output_embeddings()
    # A stage that is not the last has none.
    if any(True for _ in head.parameters()):
        head.forward = SequenceHead(head, shard)
    # Past nn.Module, to whom it is nothing.
    object.__setattr__(model, "_carpool_sequence_shard", shard)
    return shard


def sequence_shard(model: nn.Module) -> SequenceShard | None:
    """How the tokens of a model are divided over tensor-parallel ranks; None: they are not."""
    found: SequenceShard | None = getattr(model, "_carpool_sequence_shard", None)
    return found


def _summed(base: nn.Module, layers: nn.ModuleList, alike: set[int]) -> Iterator[nn.Parameter]:
    experts = {id(p) for own in rides(layers).values() for p in own.experts.parameters()}
    parts = [layers, *(child for name, child in base.named_children() if name == "norm")]
    for parameter in (found for part in parts for found in part.parameters()):
        over_tp = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        # The bias of a row-parallel layer is whole on each rank, and added to this rank's rows.
        partial = _is_whole(parameter) if over_tp else id(parameter) not in alike
        if partial and id(parameter) not in experts:
            yield parameter


def _is_whole(parameter: Any) -> bool:
    names = parameter.device_mesh.mesh_dim_names
    return bool(parameter.placements[names.index("tp")].is_replicate())


def _with_shape(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the model around the layers: says (B, L)."""
    names = list(inspect.signature(own).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        tokens: torch.Tensor = given["inputs_embeds"] if ids is None else ids
        shape = tokens.shape[0], tokens.shape[1]
        _SHAPE.set(shape)
        return own(*args, **kwargs, **{_ARGUMENT: shape})

    return forward


def _of_rows(own: Callable[..., Any], group: Group) -> Callable[..., Any]:
    """The forward of a decoder layer on this rank's rows. `group`: of the first, which takes them."""

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shape = kwargs.pop(_ARGUMENT, None)
        if shape is None:
            raise RuntimeError(
                "the model does not hand the shape of its tokens on to its layers: set parallelism.sequence_parallel="
                "false"
            )
        if group is not None:
            hidden = split_tokens(hidden.flatten(0, 1), group).unsqueeze(0)
        token = _SHAPE.set(shape)
        try:
            return own(hidden, *args, **kwargs)
        finally:
            _SHAPE.reset(token)

    return forward


def _in_region(own: Callable[..., Any], group: Group, partial: bool) -> Callable[..., Any]:
    """The forward of a module that sees all tokens."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        batch, length = _SHAPE.get()
        x = args[0] if args else kwargs.pop("hidden_states")
        whole = gather_tokens(x.flatten(0, -2), batch * length, group, partial=partial).view(batch, length, -1)
        out = own(whole, *args[1:], **kwargs)
        if partial:
            return out
        first, *others = out if isinstance(out, tuple) else (out,)
        rows = split_tokens(first.flatten(0, 1), group).unsqueeze(0)
        return (rows, *others) if isinstance(out, tuple) else rows

    return forward


class SequenceHead:
    """Stands for the forward of an output layer: logits of all tokens, on all ranks alike."""

    def __init__(self, head: Any, shard: SequenceShard) -> None:
        self.head, self.own, self.shard = head, head.forward, shard

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length = _SHAPE.get()
        x_TH = gather_tokens(hidden.flatten(0, -2), batch * length, self.shard.group, partial=False)
        logits: torch.Tensor = self.own(x_TH.view(batch, length, -1))
        return logits


def of_whole_vocabulary(parameter: Any) -> Any:
    """A parameter of an output layer whose vocabulary is sharded over tensor-parallel ranks: the whole, for this
    rank's rows. The sum of its gradients goes back to the shards' ranks."""
    if parameter is None:
        return None
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


# ---------------------------------------------------------------------------------------------------------------------
# Styles in the place of those of transformers' tensor-parallel plans that add up wrongly, or send too often.
#
# With tp_size > 1 each rank of a tensor-parallel group has some of the attention heads. Norms of queries and keys over
# one head (`q_norm`, `k_norm`) have one weight for all heads, and each rank gets the gradient of its own heads.
#
#   - A plan that adds these up (`replicated_with_grad_allreduce`) does so with what the parameter has gathered so far.
#     Without FSDP, which empties it after each backward, the sum of a second micro-batch counts the first one again.
#     Here it is added up before it accumulates.
#   - The sum that ends a row-parallel layer (`rowwise`) is sent again by a layer that is computed again. Here that
#     takes the first one.
#
# What no style mends is refused (`carpool.hf.seam.refusals`).


class _SummedGradient(TensorParallelLayer):
    """A whole parameter of which each rank has the gradient of its heads: summed in each backward, before it is added
    to those of earlier ones."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        own, group, hooked = module.forward, mesh.get_group(), dict[str, nn.Parameter]()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Not before: parameters are replaced when weights are loaded, and by FSDP.
            if torch.is_grad_enabled():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and hooked.get(name) is not parameter:
                        parameter.register_hook(summed)
                        hooked[name] = parameter
            return own(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        return module


class _KeptSum(_OnLocalTensors, RowwiseParallel):
    """transformers' `rowwise`, whose sum over ranks a layer that is computed again takes from the first time
    (`carpool.parallel.sequence`)."""

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        y, bias = sum_over(output, mesh.get_group()), module._parameters.get("bias")
        return y if bias is None else y + (bias.to_local() if isinstance(bias, DTensor) else bias)


ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", _SummedGradient())  # instead of transformers' own
ALL_PARALLEL_STYLES.register("carpool_kept_sum", _KeptSum())


def own_styles(plan: dict[str, str], experts: Iterable[str]) -> dict[str, str]:
    """Rules in the place of those of a tensor-parallel plan that send again what a layer's first forward sent.
    `experts`: rules of the expert-parallel plan, which go first."""
    kept = (rule for rule, style in plan.items() if style == "rowwise" and not rule.startswith(tuple(experts)))
    return dict.fromkeys(kept, "carpool_kept_sum")
