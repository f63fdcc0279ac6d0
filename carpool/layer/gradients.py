"""How the gradient of each parameter is reduced when the layer is used without FSDP.

The loss of the batch is the mean over ranks of each rank's loss. So
  - a dense parameter (router, shared experts, attention) has a copy on every rank, and its gradient is the mean
    over *all* ranks;
  - an expert parameter has already received, on its home, the gradients of all tokens of its expert-parallel group.
    What is missing is the sum over the *copies* of that group (expert data parallelism) and the division by the
    number of ranks that the mean asks for.
Averaging experts over all ranks, or not dividing them at all, gives gradients that are wrong by the expert-parallel
degree, with a loss curve that looks normal.

    4 ranks = 2 copies x 2 expert-parallel ranks      ranks 0 1 | 2 3
    dense: mean over 0 1 2 3        expert on rank 0: (its gradient + rank 2's) / 4
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from carpool.layer.module import LayerModule, check_mesh


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a model that belong to experts of `carpool.MoE` layers."""
    return {p for module in model.modules() if isinstance(module, LayerModule) for p in module.expert_parameters()}


@torch.no_grad()
def reduce_gradients(model: nn.Module, ep_mesh: DeviceMesh | None, edp_mesh: DeviceMesh | None = None) -> None:
    """Turn each rank's gradients into those of the mean loss over all ranks. Call on every rank, after backward.

    Args:
        model: holds `carpool.MoE` layers built on `ep_mesh`; all other parameters are replicated on every rank.
        ep_mesh: the one-dimensional expert-parallel mesh. None: one rank has all experts.
        edp_mesh: the mesh of ranks that hold copies of the same experts, if there are copies.

    Raises:
        TypeError: what is no mesh.
        ValueError: a mesh of several dimensions.
    """
    num_ranks = check_mesh(ep_mesh, "ep_mesh") * check_mesh(edp_mesh, "edp_mesh")
    groups = [mesh.get_group() for mesh in (ep_mesh, edp_mesh) if mesh is not None]
    experts = expert_parameters(model)
    for parameter in model.parameters():
        if parameter.grad is None:
            if not parameter.requires_grad:
                continue
            # A rank without tokens still takes part.
            parameter.grad = torch.zeros_like(parameter)
        for group in groups[1:] if parameter in experts else groups:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= num_ranks
