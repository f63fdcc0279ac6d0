"""How FSDP2, ZeRO-1 and expert parallelism shard a model of transformers.

    with sharded_as("zero1"):               transformers shards, and hangs no hooks on modules
        model = ...                             built or loaded, as under FSDP
    freeze_non_experts(model)                         or not
    replicate_dense(model, bfloat16=True)       parameters are whole from here on (`parallel.replicated`)

    with sharded_as("fsdp"):                    FSDP2 shards non-expert parameters
        model = ...
    keep_experts(model)                         experts are plain parameters from here on

Transformers applies FSDP2 in one function, after expert parallelism and before weights are loaded. Another stands for
it inside `sharded_as`; with "zero1" it gives each parameter the placement that FSDP2 would, so that sharded parameters
are filled as ever. Experts are concerned where several ranks hold the same ones, and where they are stored in one dtype
and computed with in another. Where one rank holds an expert alone, FSDP2 would copy its parameters in each forward and
backward, and its gradients three times in float32, so these are left out (`keep_experts`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import DistributedConfig, mixin
from transformers.distributed import fsdp as transformers_fsdp
from transformers.distributed import utils as transformers_meshes
from transformers.distributed.expert_parallel import MoEParamShard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from carpool.experts import ExpertFunction
from carpool.experts.slices import check_slices, cut
from carpool.hf.seam.experts_module import expert_function, fields_of
from carpool.hf.seam.find_modules import decoder_layers
from carpool.layout import ExpertLayout
from carpool.parallel import fsdp
from carpool.parallel.degrees import chunks
from carpool.parallel.meshes import Meshes
from carpool.parallel.replicated import Replicated

APPLY = "apply_fully_sharded_data_parallelism"
# Of a model whose experts FSDP does not have.
_LEFT_OUT = "_carpool_experts_left_out"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module, a class or an object is another."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def sharded_as(dense: str | None) -> AbstractContextManager[None]:
    """Inside, transformers distributes models as the module's docstring says: "fsdp", or "zero1", whose models cannot
    compute before `replicate_dense`. None: as transformers does."""
    return replaced(mixin, APPLY, {"fsdp": _shard_dense, "zero1": _place, None: vars(mixin)[APPLY]}[dense])


def replicate_dense(model: nn.Module, bfloat16: bool, **options: Any) -> Replicated:
    """Make the parameters of a model that was built as "zero1" whole: of experts, each rank has those of its
    expert-parallel rank. All ranks together.

    Args:
        bfloat16: compute in bfloat16, and add gradients in float32.
        options: of `Replicated`.
    """
    return Replicated(model, torch.bfloat16 if bfloat16 else None, layers=_layers(model), **options)


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers; none where they cannot be found."""
    try:
        return decoder_layers(model)
    except ValueError:
        return ()


def keep_experts(model: nn.Module) -> Replicated | None:
    """Of a model that was built as "fsdp": if FSDP has none of its experts, modules get this rank's part of them as
    plain parameters. Gradients are then summed over ranks, also of non-expert parameters, and not averaged: whoever
    makes the loss divides it by the number of data-parallel ranks. All ranks together.

    Returns:
        What has taken over the experts; None: FSDP has them, or there is no FSDP, and gradients are averaged."""
    if not getattr(model, _LEFT_OUT, False):
        return None
    fsdp.sum_gradients(model)
    return Replicated(model)


def non_expert_mesh(config: Any, meshes: Any) -> tuple[Any, list[Any]]:
    """Over which ranks FSDP2 shards non-expert parameters, and how."""
    if config.dp_replicate_size > 1:
        return meshes.get_mesh(("dp_replicate", "fsdp")), [Replicate(), Shard(0)]
    return meshes.get_mesh("fsdp"), [Shard(0)]


def _experts(model: Any, ep_plan: dict[str, str]) -> tuple[list[Any], bool]:
    """The modules of experts, and whether their state is sharded, replicated or cast beside expert parallelism."""
    config = model.config.distributed_config
    experts = [module for name, module in model.named_modules() if ep_plan.get(name) == "ep_dispatch_experts"]
    # A stage of a pipeline may have none, and does as the others do.
    dtypes = {parameter.dtype for module in experts for parameter in module.parameters()} or {model.config.dtype}
    casts = config.fsdp_mixed_precision and dtypes != {torch.bfloat16}
    return experts, config.dp_replicate_size > 1 or config.efsdp_size > 1 or casts


def _shard_dense(model: Any, meshes: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Stands for transformers' `apply_fully_sharded_data_parallelism`, which it calls."""
    apply, shard = transformers_fsdp.apply_fully_sharded_data_parallelism, transformers_fsdp.fully_shard
    experts, shared = _experts(model, ep_plan)
    if shared:
        return apply(model, meshes, fsdp_plan, ep_plan)
    setattr(model, _LEFT_OUT, True)
    theirs = {parameter for module in experts for parameter in module.parameters()}
    with replaced(transformers_fsdp, "fully_shard", partial(shard, ignored_params=theirs)):
        return apply(model, meshes, fsdp_plan, {})


def _place(model: Any, meshes: Any, fsdp_plan: dict[str, str], ep_plan: dict[str, str]) -> Any:
    """Replaces transformers' `apply_fully_sharded_data_parallelism`: parameters get placements, and no hooks."""
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise ValueError(
            "tensor parallelism divides non-expert parameters, so they cannot be whole on each rank: use "
            "parallelism.data_parallel='fsdp' or parallelism.tp_size=1"
        )
    mesh, placements = non_expert_mesh(config, meshes)
    experts, shared = _experts(model, ep_plan)
    theirs = {id(parameter) for module in experts for parameter in module.parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in theirs:
                continue
            if id(parameter) not in made:
                sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                made[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    for module in experts if shared else ():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = _shard_experts(parameter, config.dp_replicate_size > 1, meshes)
    # Transformers' generation asks for that: all ranks take part in each forward.
    model._is_fsdp_managed_module = True
    return model


def _shard_experts(parameter: DTensor, copied: bool, meshes: Any) -> nn.Parameter:
    """A parameter that expert parallelism has sharded, over the ranks that hold the same experts, as FSDP2 does it.

    Args:
        parameter: `Shard(0)` on the mesh (ep,);  copied: the model has data-parallel replicas."""
    mesh = meshes.get_mesh(("dp_replicate", "efsdp", "ep") if copied else ("efsdp", "ep"))
    shards = parameter.to_local().detach().chunk(mesh.size(mesh.ndim - 2))
    mine = mesh.get_local_rank("efsdp")
    local = shards[mine].clone() if mine < len(shards) else shards[0][:0].clone()
    ep = mesh.size(mesh.ndim - 1)
    placements = [_StridedShard(0, split_factor=ep) if ep > 1 else Shard(0), *parameter.placements]
    made = DTensor.from_local(
        local, mesh, [Replicate()] * copied + placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


# ---------------------------------------------------------------------------------------------------------------------
# Transformers shards over the meshes of the run. Its own meshes are of all ranks, one for each model, without context-
# and expert-tensor-parallel ranks; and it refuses FSDP and expert parallelism beside a pipeline. Given the mesh of one
# stage, it shards that stage.

MAKE = "initialize_distributed_mesh"


def sharded_over(meshes: Meshes | None) -> AbstractContextManager[None]:
    """Inside, transformers distributes models over the stage of `meshes`. None: over meshes that it makes."""
    if meshes is None:
        return nullcontext()

    def stage(config: DistributedConfig) -> tuple[Any, Any]:
        bound = transformers_meshes._bind_local_device(meshes.device_type, int(os.environ.get("LOCAL_RANK", "0")))
        return bound, meshes.stage

    return replaced(mixin, MAKE, stage)


# ---------------------------------------------------------------------------------------------------------------------
# Expert tensor parallelism: experts are cut into slices before the model is sharded (`carpool.experts.slices`).
#
# transformers shards the stacked weights of experts by rows, one row an expert. With a row for each slice, the same
# sharding gives each rank slices. Rows are in the order of `ExpertLayout.sliced`: the ranks of an expert are
# neighbours.
#
#     gate_up_proj of 2 experts, F = 4, in 2 slices over 4 ranks:  (2, 8, H)  ->  (4, 4, H)
#     rows [expert 0 slice 0, expert 0 slice 1, expert 1 slice 0, expert 1 slice 1], one on each rank
#
# States that leave the run have whole experts (`carpool.hf.seam.moved_experts`).


class SlicedExperts:
    """How whole parameters of a model's experts become rows of slices.

    Args:
        blueprint: the whole model; its parameters need no values.
        modules: the names of its experts modules, and the number of experts in each.
        ranks: W, over which experts are spread.
        slices: of each expert; divides W.

    Raises:
        ValueError: experts that cannot be cut so.
    """

    def __init__(self, blueprint: nn.Module, modules: Mapping[str, int], ranks: int, slices: int) -> None:
        self.modules, self.slices = list(modules), slices
        self._made_of: dict[str, tuple[str, ExpertFunction, list[int]]] = {}
        for name, number in modules.items():
            experts: Any = blueprint.get_submodule(name)
            function = expert_function(experts)
            inner = experts.down_proj.shape[1 if function.transposed else 2] if function is not None else 0
            check_slices(function, inner, slices, f"{type(experts).__name__} ({name})")
            assert function is not None
            order = [row for rank in ExpertLayout.sliced(number, ranks // slices, slices).homes for row in rank]
            for parameter, field in fields_of(experts).items():
                self._made_of[f"{name}.{parameter}"] = field, function, order

    def apply(self, model: nn.Module) -> None:
        """Cut the parameters of a model that is on the meta device, and not yet sharded."""
        for name in self.modules:
            experts: Any = model.get_submodule(name)
            for parameter, whole in list(experts._parameters.items()):
                rows = self.rows(f"{name}.{parameter}", whole.detach())
                experts._parameters[parameter] = nn.Parameter(rows, requires_grad=whole.requires_grad)
            experts.num_experts *= self.slices
            experts._carpool_slices = self.slices

    def rows(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A parameter of the whole model as it lies in the sliced one, over all ranks."""
        if name not in self._made_of:
            return whole
        field, function, order = self._made_of[name]
        return cut(field, whole, self.slices, function)[order]


# ---------------------------------------------------------------------------------------------------------------------
# Experts that the expert-parallel ranks do not divide: the last rank has fewer, as 10 on 4 ranks are 3, 3, 3 and 1.
# transformers refuses them (`grouped_gemm`); this style shards in parts of ceil(E / W), as DTensor does, and the layout
# of a layer follows (`ExpertLayout.chunked`).


class _UnevenExperts(MoEParamShard):
    def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(rows, requires_grad=whole.requires_grad)
        module._carpool_num_experts = whole.shape[0]
        module.num_experts = chunks(whole.shape[0], mesh.size())[mesh.get_local_rank()]
        module._is_expert_parallel = True


ALL_PARALLEL_STYLES.register("carpool_uneven_experts", _UnevenExperts(Shard(0), shards_expert_dim=True))


def uneven_plan(plan: dict[str, str]) -> dict[str, str]:
    """Rules in the place of those of an expert-parallel plan that want equally many experts on every rank."""
    return {rule: "carpool_uneven_experts" for rule, style in plan.items() if style == "grouped_gemm"}
